"""The folders in which torch.compile keeps the code that it has made, and from which it runs it.

    runs/digits-3fa92c1b/compile/    code of torch and Triton, for all ranks and attempts of the run
    /tmp/torchinductor_USER/         the default of torch: whoever makes it first decides what runs

torch reads the variables when it is imported, so this module does not import it.
"""

import getpass
import os
import re
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import private_folder

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def use(run: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch.compile keep its code in the run directory; what the user has set is kept.

    Folders that belong to another user are a StorageError.
    """
    # torch sets the variable itself when it is imported, as in a notebook before this call.
    if "torch" in sys.modules and environment.get(TORCH) == _default():
        del environment[TORCH]
    if TORCH not in environment:
        environment[TORCH] = str(_folder(run))
    environment.setdefault(TRITON, str(Path(environment[TORCH]) / "triton"))
    # torch keeps precompiled headers of C++ in its default folder, whatever the variable says.
    environment.setdefault(HEADERS, "0")
    if (
        environment[HEADERS] == "0" and "torch._inductor.config" in sys.modules
    ):  # inductor has read the variable already
        sys.modules["torch._inductor.config"].cpp_cache_precompile_headers = False  # type: ignore[attr-defined]


def _folder(run: Path) -> Path:
    common, own = run / "compile", run / f"compile.{os.geteuid()}"
    # Without a run directory, rank 0 of this user is about to make it. Several users may continue a
    # run where HPCTRAIN_UMASK lets their group write.
    if not run.exists() or private_folder(common):
        return common
    if private_folder(own):
        return own
    raise StorageError(
        f"{own}: not a folder of this user, or others can write there, so torch.compile would "
        f"run their code; delete it, or set {TORCH} to a private folder"
    )


def _default() -> str:
    """Return the folder that torch takes by default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name here
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir(), name))
