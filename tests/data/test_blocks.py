import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.errors import DataError
from tests.data.samplers import check_permutation, check_pure, everything

COUNTS, SEEDS, EPOCHS = st.integers(1, 2000), st.integers(-(2**70), 2**70), st.integers(0, 2**40)
BLOCKS, WINDOWS = st.integers(1, 300), st.integers(1, 40)


@given(COUNTS, SEEDS, EPOCHS, BLOCKS, WINDOWS)
def test_every_epoch_is_a_permutation(count, seed, epoch, block_size, window):
    order = BlockOrder(count, seed, block_size, window)
    check_permutation(order, epoch)


@given(COUNTS, BLOCKS, WINDOWS, st.data())
def test_it_is_a_function_of_the_position_alone(count, block_size, window, data):
    check_pure(BlockOrder(count, 3, block_size, window), 2, data, st)


@given(COUNTS, SEEDS, BLOCKS, WINDOWS)
def test_a_window_is_its_blocks_and_nothing_else(count, seed, block_size, window):
    order = BlockOrder(count, seed, block_size, window)
    windows = order._locate(1, np.arange(count))[0]
    assert (np.diff(windows) >= 0).all()
    assert (np.diff(windows) <= 1).all()
    samples = everything(order, 1)
    for number in range(int(windows[-1]) + 1):
        inside = np.sort(samples[windows == number])
        ranges = order.ranges(1, np.array([number]))
        assert len(ranges) <= window
        assert (np.diff(ranges[:, 0]) > 0).all()  # in the order on disk
        assert np.array_equal(np.concatenate([np.arange(*pair) for pair in ranges]), inside)


@given(COUNTS, BLOCKS, WINDOWS, st.data())
def test_blocks_to_read_ahead_hold_what_is_needed_once(count, block_size, window, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    order = BlockOrder(count, 5, block_size, window)
    ranges = order.blocks(4, np.arange(start, stop))
    read = np.concatenate([np.empty(0, int), *(np.arange(*pair) for pair in ranges)])
    needed = order(4, np.arange(start, stop))
    assert np.isin(needed, read).all()
    assert len(np.unique(read)) == len(read)
    whole = order.blocks(4, np.arange(count))  # an epoch reads each block once
    assert np.array_equal(np.sort(whole[:, 0]), np.arange(0, count, block_size))


def test_blocks_are_needed_in_the_order_of_the_windows():
    order = BlockOrder(1000, 0, block_size=10, window=4)
    ranges = order.blocks(0, np.arange(100, 300))
    samples = order(0, np.arange(100, 300))
    first = [np.flatnonzero((samples >= a) & (samples < b)).min(initial=200) for a, b in ranges]
    assert max(first[:4]) < min(first[8:])


def test_an_order_of_nothing_is_refused():
    with pytest.raises(DataError, match="not 0"):
        BlockOrder(0, 0, 1, 1)
