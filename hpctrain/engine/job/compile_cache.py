"""The folders in which torch.compile keeps the code that it has made, and from which it runs it.

    runs/digits-3fa92c1b/compile/    code of torch and Triton, for all ranks and attempts of the run
    /tmp/torchinductor_USER/         the default of torch: whoever makes it first decides what runs

torch reads the variables when it is imported, so this module does not import it.
"""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import private_folder

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def use(run: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch.compile keep its code in the run directory; what the user has set is kept.

    Folders that belong to another user are a StorageError.
    """
    # torch may have set the variable itself, as in a notebook before this call.
    by_torch: Any = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if by_torch and environment.get(TORCH) == by_torch.default_cache_dir():
        del environment[TORCH]
    if TORCH not in environment:
        environment[TORCH] = str(_folder(run))
    environment.setdefault(TRITON, str(Path(environment[TORCH]) / "triton"))
    # torch keeps precompiled headers of C++ in its default folder, whatever the variable says.
    environment.setdefault(HEADERS, "0")
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor and environment[HEADERS] == "0":  # it has read the variable already
        inductor.cpp_cache_precompile_headers = False


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
