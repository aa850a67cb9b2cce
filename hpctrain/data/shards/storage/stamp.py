"""The stamp of a file: what changes when somebody writes into it, or puts another in its place.

A shard must not change while a run reads it. A digest of all of it would take too long for each
batch, so the stamp of the file is compared after each read: one `stat` per shard that was read. A
file system sets the time of a write before it changes the bytes, so bytes that were read before an
equal stamp was seen are those of the unchanged file.

What this guarantees, and where it ends:

- A local file system: every write by `write` and its relatives is seen before what was read is
  used. So is the first write to each page through a memory map; a page that is still dirty may be
  written again without another time.
- Lustre and GPFS keep times coherent between nodes. A node of NFS asks its server for the times
  only every 3 to 60 s (acregmin and acregmax), so a write from another node is seen that late.
- Whoever resets the time of modification is found by the time of the last change of the inode
  (ctime). It also changes with the permissions and the number of hard links, and the other time
  with `touch`. So a stamp that differs proves nothing: the digest of the file decides.
"""

import os
import time
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

# Linux takes the time of a write from a clock that ticks every 1 to 10 ms.
_TICK_NS = 20_000_000
# Some file systems keep whole seconds only, or even ones (FAT).
_COARSE_TICK_NS = 2_000_000_000
# It takes a third of the time that a named tuple takes, and there is one for each shard of a read.
FACTS = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


class Stamp(NamedTuple):
    """What is compared; times are ns since 1970."""

    device: int  # the file system
    inode: int
    size: int
    modified_ns: int  # of the last write
    changed_ns: int  # of the last change of the content or of the inode; 0: not compared

    @classmethod
    def of(cls, status: os.stat_result, *, compare_ctime: bool = True) -> Self:
        """Return the stamp of a file, given what `os.stat` or `os.fstat` returned."""
        stamp = cls(*FACTS(status))
        return stamp if compare_ctime else stamp._replace(changed_ns=0)

    @classmethod
    def settled(cls, path: Path, *, compare_ctime: bool = True) -> Self:
        """Return the stamp of a file, after which each write gives it another one.

        Two writes within one tick of the clock have the same time, so this may wait for the next.
        """
        while True:
            stamp = cls.of(os.stat(path), compare_ctime=compare_ctime)
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
