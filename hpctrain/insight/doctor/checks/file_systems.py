"""File systems: free space and file locks."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from rich.filesize import decimal

from hpctrain.base.files.lock import why_no_locks
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.units import GIB
from hpctrain.insight.doctor.finding import Finding, bad, bounded, good, judged

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
        found = f"{there}: {error.strerror}"
        yield bad("writing", "fail", found, f"{name}: writing", name=name)


def free_space(name: str, free: int, total: int) -> Finding:
    """Judge the free bytes of a file system of `total` bytes."""
    found, check = f"{decimal(free)} of {decimal(total)}", f"{name}: free space"
    bounds = _FAIL_FREE, min(_WARN_FREE, total // 10)
    return bounded("free space", free, found, bounds, check, name=name)


def locks(name: str, why_not: str) -> Finding:
    """Judge whether all hosts can lock files; `why_not` says why they cannot."""
    found, check = why_not or "work", f"{name}: file locks"
    return judged("file locks", not why_not, found, check=check, name=name)


def readable(folder: Path) -> Finding:
    """Check the folder of a data set."""
    try:
        if "index.json" not in os.listdir(folder):
            return bad("no index", "fail", f"{folder} has no index.json", "data.path")
    except OSError as error:
        return bad("data.path", "fail", f"{folder}: {error.strerror}", folder=folder)
    return good("data.path", f"{folder}, {kind_of(folder)}")
