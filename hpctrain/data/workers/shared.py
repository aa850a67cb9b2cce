"""Shared memory of two processes that has no name, so nothing is left behind when they die.

A segment is a file in memory (memfd_create) whose descriptor is sent over a socket. Unlike
/dev/shm, it needs no clean-up and is not limited to the 64 MB that containers give /dev/shm by
default. It counts as memory of the process.

    >>> block = place("uint8", (4, 3), start=0)
    >>> segment = Segment()
    >>> segment.reserve(block.end)
    >>> view(segment.bytes(), block)[:] = 7
"""

import math
import mmap
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.shards.types import Array

ALIGNMENT = 64  # bytes: a cache line, and what torch asks of memory for its vector code


class Block(NamedTuple):
    """Where an array lies in a segment: `offset` is in bytes."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte behind the array."""
        return self.offset + np.dtype(self.dtype).itemsize * math.prod(self.shape)


def place(dtype: str, shape: tuple[int, ...], start: int) -> Block:
    """Return the first aligned block that starts at byte `start` or later."""
    return Block(-(-start // ALIGNMENT) * ALIGNMENT, dtype, shape)


def view(memory: NDArray[np.uint8], block: Block) -> Array:
    """Return the array at `block`. It keeps `memory` alive."""
    return memory[block.offset : block.end].view(block.dtype).reshape(block.shape)


class Segment:
    """A piece of shared memory that can grow: that of a descriptor, or a new one."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("hpctrain") if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> None:
        """Make at least `size` bytes usable. The content stays, and existing arrays stay valid.

        It is an OSError if there is no memory: a later write would end the process with SIGBUS.
        """
        if self._map is None or len(self._map) < size:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fallocate(self.descriptor, 0, size)
            self._map = mmap.mmap(self.descriptor, size)

    def bytes(self) -> NDArray[np.uint8]:
        """Return the whole segment as a new array. When it is dropped, the segment is unused."""
        assert self._map is not None, "reserve first"
        return np.frombuffer(self._map, np.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)
