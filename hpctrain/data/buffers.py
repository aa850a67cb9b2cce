"""Buffers for batches that are used again as soon as nobody holds a batch in them.

Fresh memory costs a page fault for every 4 KB, as much as the copy into it; page-locked memory
costs far more. So a buffer goes round: it is lent as an array, and comes back when the last
view of it is gone, tensors too. Whoever keeps batches keeps them: new buffers are made instead.
"""

import mmap
import weakref
from collections import defaultdict
from math import prod
from typing import Any

import numpy as np
import torch

from hpctrain.data.types import Array

IDLE = 8  # buffers of one size kept for later
PAGE, HUGE_PAGE = 2**12, 2**21  # bytes
# Shards' data begins at a page: a copy to the same place in a page takes a sixth longer, for the
# processor takes its loads and stores for neighbours.
BESIDE = 16


class Buffers:
    """Lends memory.

    Args:
        pin: Page-locked, for asynchronous copies to a GPU.
    """

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin and torch.cuda.is_available()
        self._idle: defaultdict[int, list[Array]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[Any]] = {}

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array with any content. It and all its views end the loan when they go."""
        kind = np.dtype(dtype)
        size = kind.itemsize * prod(shape)
        if size < PAGE and not self.pin:  # malloc has it at hand: a loan takes longer than that
            return np.empty(shape, kind)
        idle = self._idle[size]
        try:
            memory = idle.pop()
        except IndexError:
            memory = self._new(size)
        array = np.frombuffer(memory.data, kind)
        # All views of this array, torch's too, hold what it is based on: a memoryview of its
        # own. So that one's end is the end of the loan.

        def end(reference: "weakref.ref[Any]") -> None:
            del self._lent[id(reference)]
            if len(idle) < IDLE:
                idle.append(memory)

        reference = weakref.ref(array.base, end)
        self._lent[id(reference)] = reference
        return array.reshape(shape)

    def _new(self, size: int) -> Array:
        if self.pin:
            array: Array = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return array
        if size < HUGE_PAGE:
            return np.empty(size, np.uint8)
        # Large pages: fewer misses of the TLB, a tenth of the time where batches are large.
        memory = mmap.mmap(-1, size + HUGE_PAGE + BESIDE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        first = -whole.ctypes.data % HUGE_PAGE + BESIDE
        return whole[first : first + size]
