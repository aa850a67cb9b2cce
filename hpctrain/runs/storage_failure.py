"""The storage of a run fails while it trains: its directory is gone, or the disk is full.

    OSError: [Errno 28] No space left on device     ┐
    FileNotFoundError: …/run.json.lock              ├── StorageError: one sentence, exit code 6
    KeyError: 'attempts', as run.json is empty      ┘

Whatever writes first meets the fault, and what records the failure meets it again.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def told(run: Path) -> Iterator[None]:
    """Raise a StorageError for an error of the context that is due to the storage of the run."""
    try:
        yield
    except Exception as error:
        if problem := _problem(run, error):
            raise StorageError(problem) from error
        raise


def _problem(run: Path, error: Exception) -> str:
    """Return what has happened; "" if the error has nothing to do with the storage of the run."""
    if not (run / "config.yaml").exists():
        return (
            f"{run} is gone: it was deleted or renamed while the run was under way, so nothing "
            "more of it can be saved. Bring it back, and the same command goes on from its last "
            "checkpoint; without it the run starts at step 0"
        )
    if not isinstance(error, OSError):
        return ""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno in _FULL:
        facts = os.statvfs(run)
        return (
            f"{file or run}: cannot be written ({error.strerror}; the file system of the run has "
            f"{facts.f_bavail * facts.f_frsize:,} bytes free). `python -m hpctrain gc` lists what "
            "can be deleted; then the same command goes on from the last checkpoint"
        )
    if file is not None and file.is_relative_to(run):
        return f"{file}: cannot be read or written ({error.strerror})"
    return ""
