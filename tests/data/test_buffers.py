from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hpctrain.data.loading.collate import IDLE, PAGE, Buffers


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_goes_round_when_nobody_holds_it():
    for size in (PAGE, 2**21 + 8):
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
