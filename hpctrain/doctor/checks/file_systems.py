"""File systems: free space, inodes, file locks, speed, and the clock of the file server."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rich.filesize import decimal

from hpctrain.disk import temporary
from hpctrain.doctor import finding
from hpctrain.doctor.checks.clocks import skew
from hpctrain.doctor.finding import Finding, bounded, good, unknown, worst
from hpctrain.mounts import kind_of
from hpctrain.units import GIB

_FAIL_FREE, _WARN_FREE = 1 * GIB, 10 * GIB
_FAIL_INODES, _WARN_INODES = 1_000, 20_000
_PROBE_BYTES = 16 << 20
_SMALL_FILES = 20
# A slower disk holds up a training; these are far below any disk that is well.
_WARN_WRITE, _WARN_READ, _WARN_FILE_S = 10e6, 20e6, 0.2
_TRIES = 3  # what is slow once may have waited for other work on the host


@dataclass(frozen=True)
class Probe:
    """What writing a probe into a folder has shown."""

    write: float  # bytes/s, with the time to bring them to the disk
    read: float | None  # bytes/s; None if the system's cache cannot be avoided
    file_s: float  # to create, rename and delete a small file, on average
    skew_s: float  # the clock of the file server is ahead of this host's
    locks: bool  # files can be locked

    def best(self, other: Self) -> Self:
        """Return the better figures of two probes of one folder."""
        reads = [each for each in (self.read, other.read) if each is not None]
        return replace(
            self,
            write=max(self.write, other.write),
            read=max(reads, default=None),
            file_s=min(self.file_s, other.file_s),
            skew_s=min(self.skew_s, other.skew_s, key=abs),
        )


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
    if not speed:
        return
    try:
        probe = _probe(there)
        for _ in range(_TRIES - 1):
            if worst(judged(name, probe)) == "pass":
                break
            probe = probe.best(_probe(there))
    except OSError as error:
        cure = f"Let {name} name a folder in which you may write and whose quota is not used up."
        yield Finding(f"{name}: writing", "fail", f"{there}: {error.strerror}", "a file", cure)
        return
    yield from judged(name, probe)


def free_space(name: str, free: int, total: int) -> Finding:
    """Judge the free bytes of a file system of `total` bytes."""
    cure = f"Delete what is not needed (`python -m hpctrain gc`), or move {name} elsewhere."
    return bounded(
        f"{name}: free space",
        free,
        f"{decimal(free)} of {decimal(total)}",
        fail_below=_FAIL_FREE,
        warn_below=min(_WARN_FREE, total // 10),
        expected="10 GiB or a tenth of the disk",
        cure=cure,
    )


def free_inodes(name: str, free: int, total: int) -> Finding:
    """Judge how many files can still be made; file systems without a limit say 0 of 0."""
    check = f"{name}: free inodes"
    if total <= 0:
        return good(check, "no limit of the file system")
    return bounded(
        check,
        free,
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
    faster = f"Let {name} be on a faster file system"
    cure = f"{faster}: checkpoints are written there."
    yield _speed(f"{name}: write speed", probe.write, _WARN_WRITE, cure)
    if probe.read is None:
        yield unknown(f"{name}: read speed", "the system's cache cannot be avoided here")
    else:
        yield _speed(f"{name}: read speed", probe.read, _WARN_READ, f"{faster}.")
    yield bounded(
        f"{name}: small files",
        1 / probe.file_s,
        f"{1000 * probe.file_s:.1f} ms a file",
        warn_below=1 / _WARN_FILE_S,
        expected=f"below {1000 * _WARN_FILE_S:.0f} ms",
        cure=f"The metadata server is slow or busy; let {name} be on another file system.",
    )
    yield skew(f"{name}: clock of the file server", probe.skew_s)


def readable(name: str, folder: Path, *, speed: bool = True) -> Iterator[Finding]:
    """Check a folder from which runs read; with `speed`, read 64 MiB of its largest file."""
    try:
        files = [path for path in folder.iterdir() if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size, default=None)
        measured = _read_speed(largest) if largest is not None and speed else None
        for _ in range(_TRIES - 1):
            if largest is not None and measured is not None and measured < _WARN_READ:
                measured = max(measured, _read_speed(largest) or 0.0)
    except OSError as error:
        found, cure = f"{folder}: {error.strerror}", f"Correct {name}={folder}."
        yield Finding(name, "fail", found, "a data set", cure)
        return
    if not (folder / "index.json").is_file():
        cure = "Write it with `python -m data_prep`, or correct the path."
        yield Finding(name, "fail", f"{folder} has no index.json", "a data set", cure)
        return
    yield good(name, f"{folder}, {kind_of(folder)}")
    if not speed:
        return
    if measured is None:
        yield unknown(f"{name}: read speed", "the files are too small to tell")
        return
    cure = "Copy the data to a faster file system, or let jobs do it (data.stage=node)."
    yield _speed(f"{name}: read speed", measured, _WARN_READ, cure)


def _speed(check: str, rate: float, least: float, cure: str) -> Finding:
    """Judge a rate in bytes per second."""
    shown, expected = (f"{decimal(int(each))}/s" for each in (rate, least))
    return bounded(check, rate, shown, warn_below=least, expected=expected, cure=cure)


def _read_speed(path: Path) -> float | None:
    """Return the bytes per second of reading the start of a file; None for a small one."""
    if path.stat().st_size < 1 << 20:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return _drained(descriptor)
    finally:
        os.close(descriptor)


def _drained(descriptor: int) -> float:
    begin, count = time.perf_counter(), 0
    while count < 4 * _PROBE_BYTES and (part := os.read(descriptor, 1 << 20)):
        count += len(part)
    return count / (time.perf_counter() - begin)


def _probe(folder: Path) -> Probe:
    """Write and read a probe, which is deleted."""
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
            read = _read_back(descriptor)
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
    return Probe(write, read, file_s, ahead, locks)


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _read_back(descriptor: int) -> float | None:
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return _drained(descriptor)
    return None
