"""File locks (flock): one holder at a time, across processes.

The kernel releases the lock when its holder dies for any reason, so there is nothing to clean up.
"""

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base.files.disk import open_below
from hpctrain.base.files.mounts import mount_of
from hpctrain.base.forks import keep_private

log = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def file_lock(path: Path, wait: Callable[[], None], parts: int = 1) -> Iterator[int]:
    """Hold the lock on `path`, which is created if it does not exist; yield the open file.

    A program that inherits the open file also holds the lock, until it ends; a fork does not. While
    another process holds the lock, `wait` is called, which sleeps a little, or raises to give up.
    Only the holder may remove the file, whose last `parts` may not be links (see
    `disk.open_below`).
    """
    while True:
        fd = open_lock(path, os.O_RDWR | os.O_CREAT, parts)
        try:
            keep_private(fd)  # a fork during the wait would hold the lock, too
            take(fd, path, wait)
            if is_at(fd, path):
                yield fd
                return
            # The last holder has removed the file during the wait: lock the new one.
        finally:
            os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on `path`, as far as this host can see.

    This tries a shared lock. With an exclusive one, even for a short time, a process that starts at
    the same moment would fail.
    """
    try:
        fd = open_below(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would be waited for
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(fd)
    return False


def why_no_locks(folder: Path, alone: bool = False) -> str:
    """Return why processes of several hosts cannot lock files in a folder; "" if they can.

    With `alone` only those of this host count. Lustre and NFS may be mounted with locks that each
    host has for itself: then every host gets the same lock.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"{folder} has none ({error.strerror}; a Lustre client needs the option `flock`)"
    mount = mount_of(folder)
    own = mount.options & _OWN_LOCKS
    return "" if alone or not own else f"{mount.point} ({mount.type}) is mounted with {min(own)}"


_OWN_LOCKS = {"localflock", "noflock", "nolock", "local_lock=flock", "local_lock=all"}


def open_lock(path: str | Path, flags: int, parts: int = 1) -> int:
    """Open a lock file, for `open` too (`opener`). Only those who may write it may read it.

    Who may open a file, even only for reading, may lock it, and would keep its user from working.
    """
    fd = open_below(Path(path), flags, parts, 0o622)
    mode = os.fstat(fd).st_mode & 0o777
    wanted = mode & ~0o044 | (mode & 0o022) << 1
    if wanted != mode:
        with suppress(OSError):  # another user's file, or a file system without permissions
            os.fchmod(fd, wanted)
    return fd


def take(fd: int, path: Path, wait: Callable[[], None]) -> None:
    """Lock the open file on `path`, as `file_lock` does, until it is closed."""
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Lustre mounted without `flock`, for example. Working without a lock is better than
            # not working at all.
            if (device := os.fstat(fd).st_dev) not in _without:
                _without.add(device)  # else each change of run.json would tell it
                log.warning("%s: this file system has no locks (%s)", path, error)
            return None


_without = set[int]()


def is_at(fd: int, path: Path) -> bool:
    """Return whether an open file has this path, still."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def patience(seconds: float, what: str) -> Callable[[], None]:
    """Return a `wait` for `file_lock` that raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds

    def wait() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: another process has held it for {seconds:g} s")
        time.sleep(0.02)

    return wait
