"""Buffers for batches, used again as soon as nobody holds a batch in them.

New memory costs a page fault for every 4 KB, as much time as the copy into it; page-locked memory
costs far more. So a buffer is lent as an array, and comes back when its last view is gone, torch's
views included. While a consumer keeps its batches, new buffers are made.

Batches of variable length have any size. So buffers are a little larger than what is asked for:
there are four sizes from one power of two to the next, and of page-locked memory one, because torch
rounds it up to a power of two. Few free ones are kept: IDLE of a size, and in all no more than
twice what was lent at a time.
"""

import weakref
from collections import defaultdict
from math import prod
from typing import Any

import numpy as np
import torch

from hpctrain.data.shards.types import Array

IDLE = 8  # free buffers of one size that are kept
PAGE = 2**12  # bytes


class Buffers:
    """Lends arrays, whose memory it uses again; with `pin`, page-locked memory for CUDA."""

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin and torch.cuda.is_available()
        self._idle: defaultdict[int, list[Array]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._most = 0  # bytes that were lent at a time

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array with any content; the loan ends when its last view is gone."""
        kind = np.dtype(dtype)
        needed = kind.itemsize * prod(shape)
        if needed < PAGE and not (self.pin and needed):  # malloc is faster than a loan
            return np.empty(shape, kind)
        step = max(PAGE, 1 << (needed - 1).bit_length() >> (0 if self.pin else 3))
        size = -(-needed // step) * step
        idle = self._idle[size]
        try:
            memory = idle.pop()
        except IndexError:
            self._make_room(size)
            memory = self._new(size)
        array = np.frombuffer(memory.data[:needed], kind)
        # All views of this array, torch's too, refer to its base, a memoryview that nothing else
        # refers to. So the loan ends when the memoryview does.

        def end(reference: "weakref.ref[Any]") -> None:
            del self._lent[id(reference)]
            if len(idle) < IDLE:
                idle.append(memory)

        reference = weakref.ref(array.base, end)
        self._lent[id(reference)] = reference, size
        return array.reshape(shape)

    def _make_room(self, size: int) -> None:
        """Let go of the free buffers beyond the limit; other threads take and return some."""
        lent = size + sum(each for _, each in [*self._lent.values()])
        self._most = max(self._most, lent)
        if lent + sum(size * len(idle) for size, idle in [*self._idle.items()]) > 2 * self._most:
            for idle in [*self._idle.values()]:
                idle.clear()

    def _new(self, size: int) -> Array:
        if self.pin:
            array: Array = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return array
        return np.empty(size, np.uint8)
