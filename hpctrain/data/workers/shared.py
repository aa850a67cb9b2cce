"""Shared memory of two processes that has no name, so nothing is left behind when they die.

A segment is a file in memory (memfd_create) whose descriptor is sent over a socket. Unlike
/dev/shm, it needs no clean-up and is not limited to the 64 MB that containers give /dev/shm by
default. It counts as memory of the process.

    >>> segment = Segment()
    >>> packed = segment.pack({"image": images})      # small: where the arrays lie
    >>> Segment(descriptor).unpack(packed)["image"]     # in the other process, without a copy
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import DataError

ALIGNMENT = 64  # bytes: a cache line, and what torch asks of memory for its vector code


class Packed(NamedTuple):
    """An object whose arrays lie in a segment: the rest of it, and where they begin and end."""

    content: bytes
    places: list[tuple[int, int]]


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

    def pack(self, value: Any) -> Packed:
        """Copy the contiguous arrays of an object here, in place of what was here."""
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        places, end = [], 1
        for buffer in buffers:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + buffer.raw().nbytes
            places.append((start, end))
        try:
            self.reserve(end)
        except OSError as error:
            raise DataError(
                f"there is no memory to share a batch of {end} bytes with a worker process: "
                f"{error.strerror}"
            ) from None
        memory = self.bytes()
        for (start, end), buffer in zip(places, buffers, strict=True):
            memory[start:end] = buffer.raw()
        return Packed(content, places)

    def unpack(self, packed: Packed, free: "Callable[[Segment], object] | None" = None) -> Any:
        """Return the object that the other process has put here; its arrays keep the memory.

        `free` is called with the segment when the last of them is dropped.
        """
        self.reserve(max((end for _, end in packed.places), default=1))
        memory = self.bytes()
        if free is not None:
            weakref.finalize(memory, free, self).atexit = False
        buffers = [memory[start:end] for start, end in packed.places]
        return pickle.loads(packed.content, buffers=buffers)

    def __del__(self) -> None:
        os.close(self.descriptor)
