"""The folders in which torch.compile keeps the code that it has made, and from which it runs it.

    runs/digits-3fa92c1b/compile/    code of torch and Triton, for all ranks and attempts of the run
    /tmp/torchinductor_USER/         the default of torch: whoever makes it first decides what runs

torch reads the variables when it is imported, so this module does not import it.
"""

import getpass
import os
import re
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from hpctrain.disk import private_folder
from hpctrain.errors import StorageError

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def use(run: Path, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Let torch.compile keep its code in the run directory; what the user has set is kept.

    Return a warning, or None. Folders that belong to another user are a StorageError.
    """
    shared = _shared()
    # torch sets the variable itself when it is imported, as in a notebook before this call.
    if "torch" in sys.modules and environment.get(TORCH) == str(shared):
        del environment[TORCH]
    if TORCH not in environment:
        environment[TORCH] = str(_folder(run))
    environment.setdefault(TRITON, str(Path(environment[TORCH]) / "triton"))
    # torch keeps precompiled headers of C++ in the shared folder, whatever the variable says.
    if HEADERS in environment or default_is_safe():
        return None
    environment[HEADERS] = "0"
    if "torch._inductor.config" in sys.modules:  # inductor has read the variable already
        sys.modules["torch._inductor.config"].cpp_cache_precompile_headers = False  # type: ignore[attr-defined]
    return (
        f"{shared} may hold files of other users: nothing in it is used, and train.compile takes "
        "longer on CPUs"
    )


def default_is_safe() -> bool:
    """Return whether all in the folder that torch takes by default is from this user.

    The folder is made if it does not exist, so that nobody else can make it.
    """
    folder = _shared()
    try:
        above = folder.parent.stat().st_mode
        # Where everybody may write, the sticky bit keeps others from putting another in its place.
        return bool(above & stat.S_ISVTX or not above & stat.S_IWOTH) and private_folder(folder)
    except OSError:
        return False


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


def _shared() -> Path:
    """Return the folder that torch takes by default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name here
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
