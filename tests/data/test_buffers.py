import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hpctrain.data.buffers import HUGE_PAGE, IDLE, PAGE, Buffers


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_goes_round_when_nobody_holds_it():
    for size in (PAGE, HUGE_PAGE + 8):
        buffers = Buffers()
        first = buffers.take((2, size // 2), "uint8")
        place = address(first)
        other = buffers.take((size,), "uint8")
        assert address(other) != place
        del first
        assert address(buffers.take((size // 8,), "int64")) == place


def test_any_view_of_it_keeps_it():
    buffers = Buffers()
    array = buffers.take((4, 512), "int32")
    place = address(array)
    part = torch.from_numpy(array).unbind()[3][506:]
    part[:] = 7
    del array
    other = buffers.take((4, 512), "int32")
    other[:] = 0
    assert address(other) != place
    assert part.tolist() == [7] * 6
    del part
    assert address(buffers.take((4, 512), "int32")) == place


def test_small_ones_are_lent_where_memory_is_page_locked():
    """A GPU is needed for such memory; other memory stands for it."""
    buffers = Buffers()
    buffers.pin, buffers._new = True, lambda size: np.empty(size, np.uint8)
    counts = (0, 1, 5, PAGE, PAGE + 1, 5 * PAGE, 16 * PAGE)
    held = [buffers.take((count,), "bool") for count in counts]
    assert [array.shape for array in held] == [(count,) for count in counts]
    sizes = sorted(size // PAGE for _, size in buffers._lent.values())
    assert sizes == [1, 1, 1, 2, 8, 16], "torch takes a power of two in any case"


def test_threads_share_them():
    buffers = Buffers()

    def use(number):
        for _ in range(500):
            array = buffers.take((1000,), "int64")
            array[:] = number
            assert (array == number).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert np.sum([len(idle) for idle in buffers._idle.values()]) <= IDLE


@pytest.mark.parametrize("held", [5, 20])
def test_batches_of_any_length_keep_little_memory(held):
    """Page-locked buffers are kept by the same rules, and need a GPU."""
    draw, buffers, most = random.Random(0), Buffers(), 0
    made = []
    buffers._new, new = lambda size: made.append(size) or new(size), buffers._new
    batches = deque(maxlen=held)
    for _ in range(3000):
        length = draw.randint(PAGE, 64 * PAGE)
        batches.append(buffers.take((length,), "S1"))
        most = max(most, sum(array.nbytes for array in batches))
    idle = [size * len(free) for size, free in buffers._idle.items()]
    lent = sum(size for _, size in buffers._lent.values())
    assert len(buffers._idle) <= 4 * 6 + 1  # from PAGE to 64 of them
    assert sum(idle) + lent <= 2 * (1.25 * most + 1.25 * 64 * PAGE)
    assert len(made) < 3000 / 4, "most of them are used again"
