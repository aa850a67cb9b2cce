"""The staged shards of one user on one node, in a folder that all their processes and jobs share.

    BASE/hpctrain-stage-UID/         private to the user, mode 700
        lock                         carries the locks described below
        boot                         the boot id of the machine when these files were written
        2d06…c9                      a shard, named by the digest of its bytes: equal data is
                                     stored once, whatever its name and its source
        2d06…c9.4711-k2s8.part       a copy that process 4711 is making

All locks are locks of the kernel. They end with their process, however it ends, so no stale lock
can remain.

- A byte range lock on `lock`, at a byte offset that is computed from the digest: shared while a
  process uses the shard, exclusive while a process copies or evicts it. These are "open file
  description" locks (fcntl(2)): one descriptor is enough for any number of shards, and a lock is
  not lost when a thread closes another descriptor of the same file.
- A lock on the first byte of `lock`, held for a moment while a process counts bytes, makes room and
  reserves space.
- flock on a `.part` file: the process that writes it is alive. Other `.part` files are removed by
  the next process that opens the depot.

The locks only save work. If they were lost (for example because someone emptied /tmp), a shard
would be copied twice, into two different files, and each would be renamed into place when complete.
Wrong bytes can never result.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.files.disk import private_folder
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.processes import cgroup
from hpctrain.data.places.origin import digest_of
from hpctrain.data.shards.index import Shard
from hpctrain.errors import StorageError

PART = ".part"
_LOCK, _BOOT = "lock", "boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"([0-9a-f]{32})(\..*)?")
_FLOCK = "hhqqi4x"  # struct flock of fcntl(2): type, whence, start, length, pid


class Depot:
    """The folder of staged shards, its budget and its locks.

    `base` is an existing folder of this node, such as TMPDIR, whose files other users cannot
    change. `budget_bytes` limits all files in it together. None: half of the free space; in memory
    (/dev/shm), where files count as the job's memory, also at most a quarter of that.
    """

    def __init__(self, base: Path, budget_bytes: int | None = None) -> None:
        self.folder = base / f"hpctrain-stage-{os.geteuid()}"
        kind = kind_of(base)
        if kind == "network":
            raise StorageError(f"{base} is on a network file system, not of this node")
        self.in_memory = kind == "memory"
        self._mutex = threading.Lock()
        try:
            _make_private(base, self.folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._lock = os.open(self.folder / _LOCK, flags, 0o600)
        except OSError as error:
            raise StorageError(f"{base}: {error.strerror}") from None
        try:
            with self._accounting():
                self._clean()
                staged = sum(entry.size for entry in self._entries())
                free = max(0, free_bytes(base))
        except OSError as error:
            os.close(self._lock)
            raise StorageError(f"{base}: {error.strerror}") from None
        if budget_bytes is None:
            limit = job_memory() // 4 if self.in_memory else free + staged
            budget_bytes = min(limit, (free + staged) // 2)
        self.budget_bytes = budget_bytes

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard, whether it is staged or not."""
        return self.folder / digest_of(shard)

    def is_there(self, shard: Shard) -> bool:
        """Return whether a shard is staged, whoever uses it."""
        try:
            return self.path(shard).stat().st_size == shard.bytes
        except OSError:
            return False

    def hold(self, shard: Shard) -> bool:
        """Keep a staged shard from eviction until `drop`. Return False if it is not staged."""
        if not self.is_there(shard) or not self._flock(fcntl.F_RDLCK, _offset(digest_of(shard))):
            return False
        if not self.is_there(shard):  # the shard was evicted just before the lock
            self.drop(shard)
            return False
        with suppress(OSError):
            # Set the time of the last use. The modification time must stay: processes that have
            # the file open would take it for edited.
            path = self.path(shard)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return True

    def claim(self, shard: Shard) -> bool:
        """Become the only process that copies a shard, until `hold` or `drop`; else False."""
        return self._flock(fcntl.F_WRLCK, _offset(digest_of(shard)))

    def drop(self, shard: Shard) -> None:
        """Allow other processes to copy or evict a shard."""
        self._flock(fcntl.F_UNLCK, _offset(digest_of(shard)))

    def create(self, shard: Shard, keep: Collection[str]) -> tuple[int, Path] | None:
        """Create a file with room for a claimed shard; return an open descriptor and the path.

        None if there is no room, even after evicting what nobody uses and `keep` does not name.
        """
        with self._accounting():
            if not self._make_room(shard.bytes, keep):
                return None
            part = self.folder / f"{digest_of(shard)}.{os.getpid()}-{secrets.token_hex(4)}{PART}"
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(descriptor, 0, shard.bytes)
            except OSError:
                self.discard(descriptor, part)
                raise
        return descriptor, part

    def commit(self, shard: Shard, descriptor: int, part: Path) -> None:
        """Give a complete copy its final name."""
        with self._accounting():  # otherwise it could be counted under neither name
            os.replace(part, self.path(shard))
        os.close(descriptor)

    def discard(self, descriptor: int, part: Path) -> None:
        """Remove a copy that has failed."""
        with suppress(OSError):
            part.unlink()
        os.close(descriptor)

    def close(self) -> None:
        """Drop all locks. In memory, also remove the shards that no other process uses."""
        if self.in_memory and self._lock >= 0:
            self._flock(fcntl.F_UNLCK, 1, 0)
            with suppress(OSError), self._accounting():
                for entry in self._entries():
                    self._evict(entry)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor and nothing else. In a forked child, the parent keeps its locks."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _clean(self) -> None:
        """Remove the files of dead processes. After a reboot remove all: they may be incomplete."""
        boot = _BOOT_ID.read_text()
        seen = self.folder / _BOOT
        rebooted = not seen.exists() or seen.read_text() != boot
        for entry in self._entries():
            path = self.folder / entry.name
            if rebooted:  # a crash of the machine loses bytes that were not yet on the disk
                path.unlink(missing_ok=True)
            elif path.suffix == PART:
                with suppress(OSError), open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
        if rebooted:
            seen.write_text(boot)

    def _make_room(self, size: int, keep: Collection[str]) -> bool:
        self._check_lock()
        self._clean()
        entries = self._entries()
        over = sum(entry.size for entry in entries) + size - self.budget_bytes
        short = max(over, size - free_bytes(self.folder))
        unused = [e for e in entries if e.digest not in keep and not e.name.endswith(PART)]
        if short > sum(entry.size for entry in unused):
            return False  # do not evict anything in vain
        for entry in sorted(unused, key=lambda entry: entry.used):
            if short <= 0:
                break
            if self._evict(entry):
                short -= entry.size
        return short <= 0

    def _check_lock(self) -> None:
        """Notice that somebody has emptied the folder: then our locks are on a deleted file."""
        lock = self.folder / _LOCK
        if not lock.exists() or not os.path.samestat(os.fstat(self._lock), lock.stat()):
            raise FileNotFoundError(errno.ENOENT, "the staging folder was emptied", str(lock))

    def _evict(self, entry: "_Entry") -> bool:
        """Remove a file, if no other process uses it."""
        if not self._flock(fcntl.F_WRLCK, _offset(entry.digest)):
            return False
        (self.folder / entry.name).unlink(missing_ok=True)
        self._flock(fcntl.F_UNLCK, _offset(entry.digest))
        return True

    def _entries(self) -> list["_Entry"]:
        entries = []
        with os.scandir(self.folder) as found:
            for file in found:
                if match := _NAME.match(file.name):
                    with suppress(FileNotFoundError):
                        info = file.stat(follow_symlinks=False)
                        entries.append(_Entry(file.name, match[1], info.st_size, info.st_atime))
        return entries

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        """Let one process of the node at a time count and reserve bytes."""
        with self._mutex:
            self._flock(fcntl.F_WRLCK, 0, wait=True)
            try:
                yield
            finally:
                self._flock(fcntl.F_UNLCK, 0)

    def _flock(self, kind: int, start: int, length: int = 1, *, wait: bool = False) -> bool:
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._lock, command, struct.pack(_FLOCK, kind, 0, start, length, 0))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process holds it
            return False
        return True


class _Entry(NamedTuple):
    name: str
    digest: str
    size: int
    used: float  # the time of the last use, in seconds since 1970


def _offset(digest: str) -> int:
    """Return the byte of `lock` that stands for a shard: 1 to 2^60."""
    return 1 + int(digest[:15], 16)


def _make_private(base: Path, folder: Path) -> None:
    """Create the folder, or check that nobody else can change its content."""
    mode = base.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StorageError(f"{base} is writable for everybody and not sticky (chmod +t)")
    if not private_folder(folder) or folder.stat().st_mode & 0o077:
        info = folder.lstat()
        raise StorageError(
            f"{folder} is not a folder of this user alone (owner {info.st_uid}, mode "
            f"{stat.S_IMODE(info.st_mode):o}; expected {os.geteuid()}, 700)"
        )


def free_bytes(folder: Path) -> int:
    """Return how many bytes may be written there: the free space less 2 % of the disk."""
    info = os.statvfs(folder)
    return (info.f_bavail - info.f_blocks // 50) * info.f_frsize


def job_memory(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of memory that this process's job may use on this node.

    It is the least of the machine's memory, the cgroup's limits and what was asked of Slurm.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [machine, cgroup.memory_limit(cgroup.folders("memory"))]
    megabytes = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    per_cpu, cpus = environ.get("SLURM_MEM_PER_CPU"), environ.get("SLURM_CPUS_ON_NODE")
    if not megabytes and per_cpu and cpus:
        megabytes = int(per_cpu) * int(cpus)
    return int(min([*limits, megabytes * 2**20] if megabytes else limits))
