"""File systems: free space, inodes, file locks, speed, and the clock of the file server."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from hpctrain.disk import temporary
from hpctrain.doctor import finding
from hpctrain.doctor.checks.clocks import skew
from hpctrain.doctor.finding import Finding, bounded, good, worst
from hpctrain.mounts import kind_of
from hpctrain.units import GIB

_FAIL_FREE, _WARN_FREE = 1 * GIB, 10 * GIB
_FAIL_INODES, _WARN_INODES = 1_000, 20_000
_PROBE_BYTES = 16 << 20
_SMALL_FILES = 20
# A slower disk holds up a training; these are far below any disk that is well.
_WARN_WRITE, _WARN_FILE_S = 10e6, 0.2
_TRIES = 3  # what is slow once may have waited for other work on the host


@dataclass(frozen=True)
class Probe:
    """What writing a probe into a folder has shown."""

    write: float  # bytes/s, with the time to bring them to the disk
    file_s: float  # to create, rename and delete a small file, on average
    skew_s: float  # the clock of the file server is ahead of this host's
    locks: bool  # files can be locked


def checked(name: str, folder: Path, *, speed: bool = True) -> Iterator[Finding]:
    """Check a folder into which runs write, or the nearest one above it that exists.

    With `speed` a probe is written: 16 MiB and a few small files, which are deleted.
    """
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    shown = str(folder) if there == folder else f"{folder} (will be made in {there})"
    yield good(name, f"{shown}, {kind_of(there)}")
    facts = os.statvfs(there)
    yield free_space(name, facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)
    yield free_inodes(name, facts.f_favail, facts.f_files)
    found: list[Finding] = []
    try:
        for _ in range(_TRIES * speed):
            found = [*judged(name, _probe(there))]
            if worst(found) == "pass":
                break
    except OSError as error:
        cure = f"Let {name} name a folder in which you may write and whose quota is not used up."
        found = [Finding(f"{name}: writing", "fail", f"{there}: {error.strerror}", "a file", cure)]
    yield from found


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


def free_inodes(name: str, free: int, total: int) -> Finding:
    """Judge how many files can still be made; file systems without a limit say 0 of 0."""
    return bounded(
        f"{name}: free inodes",
        free if total > 0 else _WARN_INODES,
        f"{free:,} of {total:,}",
        fail_below=_FAIL_INODES,
        warn_below=_WARN_INODES,
        expected=f"at least {_WARN_INODES:,}",
        cure=f"Delete small files, or move {name}: a run needs some hundred files.",
    )


def judged(name: str, probe: Probe) -> Iterator[Finding]:
    """Judge what a probe has shown."""
    yield finding.judged(
        f"{name}: file locks",
        probe.locks,
        "work" if probe.locks else "the file system has none",
        "flock",
        f"Let {name} be on a file system with locks (Lustre: mounted with flock): without them two "
        "jobs can write into one run.",
    )
    yield bounded(
        f"{name}: write speed",
        probe.write,
        f"{decimal(int(probe.write))}/s",
        warn_below=_WARN_WRITE,
        expected=f"{decimal(int(_WARN_WRITE))}/s",
        cure=f"Let {name} be on a faster file system: checkpoints are written there.",
    )
    yield bounded(
        f"{name}: small files",
        1 / probe.file_s,
        f"{1000 * probe.file_s:.1f} ms a file",
        warn_below=1 / _WARN_FILE_S,
        expected=f"below {1000 * _WARN_FILE_S:.0f} ms",
        cure=f"The metadata server is slow or busy; let {name} be on another file system.",
    )
    yield skew(f"{name}: clock of the file server", probe.skew_s)


def readable(folder: Path) -> Finding:
    """Check the folder of a data set."""
    found, cure = f"{folder}, {kind_of(folder)}", ""
    try:
        if "index.json" not in os.listdir(folder):
            found = f"{folder} has no index.json"
            cure = "Write it with `python -m data_prep`, or correct the path."
    except OSError as error:
        found, cure = f"{folder}: {error.strerror}", f"Correct data.path={folder}."
    return finding.judged("data.path", not cure, found, "a data set", cure, "fail")


def _probe(folder: Path) -> Probe:
    """Write a probe, which is deleted."""
    path = temporary(folder / "doctor")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            content = os.urandom(1 << 20)  # a file system may compress
            begin, before = time.perf_counter(), time.time()
            for _ in range(_PROBE_BYTES >> 20):
                os.write(descriptor, content)
            os.fsync(descriptor)
            write = _PROBE_BYTES / (time.perf_counter() - begin)
            changed, after = os.fstat(descriptor).st_mtime, time.time()
            # The server has set the time of the file at some moment between these two.
            ahead = min(changed - before, 0.0) + max(changed - after, 0.0)
            locks = _can_lock(descriptor)
        finally:
            os.close(descriptor)
        begin = time.perf_counter()
        for _ in range(_SMALL_FILES):
            small = temporary(folder / "doctor")
            small.touch()
            small.rename(path)
        file_s = (time.perf_counter() - begin) / _SMALL_FILES
    finally:
        path.unlink(missing_ok=True)
    return Probe(write, file_s, ahead, locks)


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True
