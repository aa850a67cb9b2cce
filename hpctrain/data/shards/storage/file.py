"""Read a shard's file with `preadv`, and repeat a read that fails for a short time.

When a file system fails, a process that reads through a memory map is killed. A read reports what
went wrong.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from hpctrain.data.shards.storage.scratch import Bytes, Damaged
from hpctrain.errors import DataError

T = TypeVar("T")

PAUSES_S = (0.1, 0.4, 1.6)  # before each repetition of a read
# The errors of a file system that is busy, or cannot reach its server for a moment.
_PASSING = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EREMOTEIO}

log = logging.getLogger(__name__)


class File:
    """A file descriptor that the datasets of a file share, closed with the last of them.

    `key` tells the file from every other one, and from a new one of the same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self._identity = _identity(status)
        self.size = status.st_size
        self.key = (status.st_dev, status.st_ino, *self._identity)

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset`; a file that ends before is Damaged."""
        patiently(lambda: self._read(offset, out), self._reopen)

    def will_need(self, offset: int, size: int) -> None:
        """Let the kernel read a range ahead, if it can."""
        os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def _read(self, offset: int, out: Bytes) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out[done:].data], offset + done)
            if not count:
                raise Damaged(f"the file ends at byte {offset + done}")
            done += count

    def _reopen(self) -> None:
        """Open the file again: a handle that a network file system has forgotten stays invalid."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _identity(os.fstat(descriptor)) != self._identity:
                raise Damaged("the file has been replaced while it was read")
            # Under the same number, so that other threads that read this file use it too.
            os.dup2(descriptor, self._descriptor, inheritable=False)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def patiently(action: Callable[[], T], again: Callable[[], None] | None = None) -> T:
    """Call `action`, and repeat it if a file system fails for a short time, after `again`."""
    for pause in PAUSES_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            log.warning("a read failed, trying again in %s s: %s", pause, error)
        time.sleep(pause)
        if again is not None:
            with suppress(OSError):
                again()
    return action()


@contextmanager
def reading(path: Path, name: str, first: int, last: int) -> Iterator[None]:
    """Name the file, the dataset and the samples in the errors of the context."""
    try:
        yield
    except Damaged as error:
        raise DataError(
            f"shard {path}: {name!r} is damaged in samples {first} to {last}: {error}"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"shard {path}: {name!r} cannot be read in samples {first} to {last}: {error}"
        ) from None
