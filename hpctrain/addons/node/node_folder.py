"""The folder of a job's staged shards on this node, which all its processes share.

    BASE/hpctrain-stage-UID-JOB-BOOT/     private to the user, mode 700
        lock            each process that uses the folder holds it, shared with the others
        room            held for a moment, while a process counts bytes and reserves space
        2d06…c9         a shard, named by the digest of its bytes
        2d06…c9.part    a copy that is being made, by the thread that holds a lock on it

All locks are those of flock(2). They end with their process, however it ends, so no stale lock can
remain. Who needs a shard that another process is copying waits for the lock of its `.part`. If that
process dies, the next one begins the copy anew.

The last process that closes the folder removes it. If all were killed, the next run of this user on
the node does; a step that Slurm starts again in the same job uses what is there. BOOT is a part of
the boot id of the machine: what was written before a crash of the machine may be incomplete.
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import private_folder
from hpctrain.base.files.lock import file_lock, is_at
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.forks import keep_private
from hpctrain.base.processes import cgroup
from hpctrain.data.places.origin import digest_of
from hpctrain.data.shards.index import Shard

_PART = ".part"
_LOCK, _ROOM = "lock", "room"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAP_S = 0.02  # between two looks at a lock


class NodeFolder:
    """The folder, its budget and its locks; `close` lets it go.

    `base` is an existing folder of this node, such as TMPDIR, whose files other users cannot
    change. `budget_bytes` limits all files in the folder together. None: half of the free space; in
    memory (/dev/shm), where files count as the job's memory, also at most a quarter of that.
    """

    def __init__(self, base: Path, budget_bytes: int | None = None) -> None:
        kind = kind_of(base)
        if kind == "network":
            raise StorageError(f"{base} is on a network file system, not of this node")
        try:
            ours = f"hpctrain-stage-{os.geteuid()}-"
            job = os.environ.get("SLURM_JOB_ID", "local")
            self.folder = base / f"{ours}{job}-{_BOOT_ID.read_text()[:8]}"
            _check_base(base)
            for other in base.glob(f"{ours}*"):
                if other != self.folder:
                    _remove_if_dead(other)
            self._lock = _locked(self.folder)
            keep_private(self._lock)
            staged, free = self._bytes(), max(0, free_bytes(base))
        except OSError as error:
            raise StorageError(f"{base}: {error.strerror}") from None
        if budget_bytes is None:
            limit = job_memory() // 4 if kind == "memory" else free + staged
            budget_bytes = min(limit, (free + staged) // 2)
        self.budget_bytes = budget_bytes

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard, whether it is staged or not."""
        return self.folder / digest_of(shard)

    def is_there(self, shard: Shard) -> bool:
        """Return whether a shard is staged."""
        try:
            return self.path(shard).stat().st_size == shard.bytes
        except OSError:
            return False

    def bring(self, shard: Shard, copy: Callable[[int], None]) -> bool:
        """Let `copy(descriptor)` write a shard that is not there yet. False: there is no room.

        It waits for another thread or process that is copying the shard.
        """
        if self.is_there(shard):
            return True
        part = self.folder / f"{digest_of(shard)}{_PART}"
        with _held(part) as descriptor:
            if self.is_there(shard):  # whoever had the lock has finished the copy
                part.unlink()
                return True
            return self._copied(descriptor, part, shard, copy)

    def close(self) -> None:
        """Let the folder go, and remove it if no other process uses it."""
        if self._lock >= 0:
            with suppress(OSError):
                _remove(self.folder, self._lock)
            os.close(self._lock)
        self._lock = -1

    def _copied(
        self, descriptor: int, part: Path, shard: Shard, copy: Callable[[int], None]
    ) -> bool:
        """Make a copy in the file `part`, which is locked. False: there is no room for it."""
        try:
            if found := self._reserve(descriptor, shard.bytes):
                copy(descriptor)
                with _held(self.folder / _ROOM):  # who counts meanwhile would miss it
                    part.replace(self.path(shard))
        finally:
            part.unlink(missing_ok=True)
        return found

    def _reserve(self, descriptor: int, size: int) -> bool:
        """Make a file as large as the shard, if there is room."""
        if not is_at(self._lock, self.folder / _LOCK):
            raise FileNotFoundError(2, "the staging folder was emptied")
        with _held(self.folder / _ROOM):  # one process at a time counts
            os.ftruncate(descriptor, 0)  # of a process that died
            if self._bytes() + size > self.budget_bytes or size > free_bytes(self.folder):
                return False
            os.posix_fallocate(descriptor, 0, size)
        return True

    def _bytes(self) -> int:
        """Return the bytes of all files in the folder."""
        total = 0
        with os.scandir(self.folder) as found:
            for file in found:
                with suppress(FileNotFoundError):
                    total += file.stat(follow_symlinks=False).st_size
        return total


def _locked(folder: Path) -> int:
    """Make the folder if it is not there, and return a descriptor that holds its lock, shared."""
    while True:
        if not private_folder(folder) or folder.stat().st_mode & 0o077:
            info = folder.lstat()
            raise StorageError(
                f"{folder} is not a folder of this user alone (owner {info.st_uid}, mode "
                f"{stat.S_IMODE(info.st_mode):o}; expected {os.geteuid()}, 700)"
            )
        with suppress(FileNotFoundError):  # it has just been removed
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a process that is removing the folder
            if is_at(lock, folder / _LOCK):
                return lock
            os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    """Remove the folder of a job if none of its processes lives."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            _remove(folder, lock)
        finally:
            os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    """Remove a folder whose lock only `lock` holds; a BlockingIOError if others hold it, too."""
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not is_at(lock, folder / _LOCK):
        return  # another process was faster
    # Under another name, because a process that begins now makes the folder anew.
    gone = folder.with_name(f"{folder.name}-{os.getpid()}")
    folder.rename(gone)
    for path in sorted(gone.iterdir(), key=lambda path: path.name == _LOCK):
        path.unlink()
    gone.rmdir()


@contextmanager
def _held(path: Path) -> Iterator[int]:
    """Hold the lock on a file, and yield the open file."""
    with file_lock(path, _nap) as descriptor:
        try:
            yield descriptor
        finally:  # a fork of the moment in which it was opened has it, too, and would keep the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _nap() -> None:
    time.sleep(_NAP_S)


def _check_base(base: Path) -> None:
    """Check that nobody else can put another folder in the place of ours."""
    mode = base.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StorageError(f"{base} is writable for everybody and not sticky (chmod +t)")


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
