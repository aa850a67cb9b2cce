"""Read a shard's file with `preadv`, and repeat a read that fails for a short time.

When a file system fails, a process that reads through a memory map is killed. A read reports what
went wrong.

Here is, too, what the decoders of HDF5's filters share: types, errors and buffers.
"""

import errno
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import DataError

Bytes = NDArray[np.uint8]
# (stored bytes, bytes of the result, buffer for the result or None) -> result
Stage = Callable[[Bytes, int, Bytes | None], Bytes]
Errors = tuple[type[Exception], ...]  # what a library raises for bytes that it cannot decode


class Undecodable(Exception):
    """Only HDF5 itself can decode a dataset; the message says why."""


class Damaged(Exception):
    """The stored bytes are not those that were written; the message says in which way."""


def load(name: str) -> Any:
    """Import a library; Undecodable if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Undecodable(f"the Python package {name.split('.')[0]} is not installed") from None


class _Scratch(threading.local):
    """The buffers of a thread, by use. New memory per chunk would cost more than decoding LZ4."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def __call__(self, use: str, nbytes: int) -> Bytes:
        """Return uint8 (nbytes,). Its content is valid until the next call for the same use."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


scratch = _Scratch()


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


# Linux takes the time of a write from a clock that ticks every 1 to 10 ms.
_TICK_NS = 20_000_000
# Some file systems keep whole seconds only, or even ones (FAT).
_COARSE_TICK_NS = 2_000_000_000
# It takes a third of the time that a named tuple takes, and there is one for each shard of a read.
FACTS = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


class Stamp(NamedTuple):
    """What is compared; times are ns since 1970.

    It changes when somebody writes into a file, or puts another in its place.

    A shard must not change while a run reads it. A digest of all of it would take too long for each
    batch, so the stamp of the file is compared after each read: one `stat` per shard that was read.
    A file system sets the time of a write before it changes the bytes, so bytes that were read
    before an equal stamp was seen are those of the unchanged file.

    What this guarantees, and where it ends:

    - A local file system: every write by `write` and its relatives is seen before what was read is
      used. So is the first write to each page through a memory map; a page that is still dirty may
      be written again without another time.
    - Lustre and GPFS keep times coherent between nodes. A node of NFS asks its server for the times
      only every 3 to 60 s (acregmin and acregmax), so a write from another node is seen that late.
    - Whoever resets the time of modification is found by the time of the last change of the inode
      (ctime). It also changes with the permissions and the number of hard links, and the other time
      with `touch`. So a stamp that differs proves nothing: the digest of the file decides.
    """

    device: int  # the file system
    inode: int
    size: int
    modified_ns: int  # of the last write
    changed_ns: int  # of the last change of the content or of the inode

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the stamp of a file, given what `os.stat` or `os.fstat` returned."""
        return cls(*FACTS(status))

    @classmethod
    def settled(cls, path: Path) -> Self:
        """Return the stamp of a file, after which each write gives it another one.

        Two writes within one tick of the clock have the same time, so this may wait for the next.
        """
        while True:
            stamp = cls.of(os.stat(path))
            wait_ns = stamp.modified_ns + stamp.tick_ns - time.time_ns()
            if not 0 < wait_ns <= stamp.tick_ns:  # a time in the future is that of another clock
                return stamp
            time.sleep(wait_ns / 1e9)

    @property
    def tick_ns(self) -> int:
        """How far apart two writes are if they have different times."""
        return _COARSE_TICK_NS if self.modified_ns % 1_000_000_000 == 0 else _TICK_NS

    @property
    def file(self) -> tuple[int, int]:
        """Which file it is, whatever its content."""
        return self.device, self.inode


def clock(ns: int) -> str:
    """Return a time in ns since 1970 as the clock of this machine shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns / 1e9))
