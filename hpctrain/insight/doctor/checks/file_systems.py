"""File systems: free space and file locks."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from rich.filesize import decimal

from hpctrain.base.files.lock import why_no_locks
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.units import GIB
from hpctrain.insight.doctor.finding import Finding, bounded, good, judged

_FAIL_FREE, _WARN_FREE = 1 * GIB, 10 * GIB
_PROBE_BYTES = 16 << 20


def checked(name: str, folder: Path, *, write: bool = True) -> Iterator[Finding]:
    """Check a folder into which runs write, or the nearest one above it that exists.

    With `write` a file of 16 MiB is written, which is deleted.
    """
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    shown = str(folder) if there == folder else f"{folder} (will be made in {there})"
    yield good(name, f"{shown}, {kind_of(there)}")
    facts = os.statvfs(there)
    yield free_space(name, facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)
    try:
        if write:
            with TemporaryFile(dir=there) as file:
                file.write(os.urandom(_PROBE_BYTES))  # a file system may compress
                file.flush()
                os.fsync(file.fileno())
            yield locks(name, why_no_locks(there))
    except OSError as error:
        cure = f"Let {name} name a folder in which you may write and whose quota is not used up."
        yield Finding(f"{name}: writing", "fail", f"{there}: {error.strerror}", "a file", cure)


def free_space(name: str, free: int, total: int) -> Finding:
    """Judge the free bytes of a file system of `total` bytes."""
    return bounded(
        f"{name}: free space",
        free,
        f"{decimal(free)} of {decimal(total)}",
        fail_below=_FAIL_FREE,
        warn_below=min(_WARN_FREE, total // 10),
        expected="10 GiB or a tenth of the disk",
        cure=f"Delete what is not needed (`python -m hpctrain gc`), or move {name} elsewhere.",
    )


def locks(name: str, why_not: str) -> Finding:
    """Judge whether all hosts can lock files; `why_not` says why they cannot."""
    cure = f"Let {name} be on a file system with locks: else two jobs can write into one run."
    return judged(f"{name}: file locks", not why_not, why_not or "work", "flock", cure)


def readable(folder: Path) -> Finding:
    """Check the folder of a data set."""
    found, cure = f"{folder}, {kind_of(folder)}", ""
    try:
        if "index.json" not in os.listdir(folder):
            found = f"{folder} has no index.json"
            cure = "Write it with `python -m data_prep`, or correct the path."
    except OSError as error:
        found, cure = f"{folder}: {error.strerror}", f"Correct data.path={folder}."
    return judged("data.path", not cure, found, "a data set", cure, "fail")
