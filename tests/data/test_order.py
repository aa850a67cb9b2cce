import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.buckets import Buckets
from hpctrain.data.samplers.mixture import Mixture
from hpctrain.data.samplers.order import Order, Repeat, draw
from hpctrain.data.samplers.permutation import MAX_COUNT
from hpctrain.data.samplers.weighted import Balanced
from hpctrain.errors import DataError
from tests.data.samplers import check_pure, everything


@pytest.mark.parametrize("count", [*range(1, 70), 127, 128, 129, 997])
def test_small_counts_are_permuted(count):
    order = Order(count, seed=5)
    for epoch in range(3):
        samples = everything(order, epoch)
        assert sorted(samples.tolist()) == list(range(count))
        assert order.inverse(epoch, samples).tolist() == list(range(count))


@given(
    count=st.integers(1, MAX_COUNT),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
def test_the_inverse_maps_back(count, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    positions = np.array(positions, dtype=np.int64)
    order = Order(count, seed)
    samples = order(epoch, positions)
    assert samples.dtype == np.int64
    assert ((samples >= 0) & (samples < count)).all()
    assert (order.inverse(epoch, samples) == positions).all()
    assert (order(epoch, order.inverse(epoch, positions)) == positions).all()


@given(st.integers(1, 10**6), st.lists(st.integers(0, 10**6), max_size=50))
def test_it_is_a_function_of_the_position_alone(count, positions):
    positions = np.array(positions, dtype=np.int64) % count
    order = Order(count, seed=1)
    together = order(2, positions)
    assert together.tolist() == [int(order(2, np.array([p]))[0]) for p in positions]


BLOCKS_42, BLOCKS_LARGE = BlockOrder(1000, 42, 64, 4), BlockOrder(10**6, 42, 1024, 8)
WEIGHTS = {"web": 1.0, "books": 0.1**0.5, "code": 0.05**0.5}
MIXTURE = Mixture({"web": 1000, "books": 100, "code": 50}, WEIGHTS, seed=42)
BUCKETS = Buckets(Order(23, 42), lambda indices: indices % 5, window=8, size=2, seed=42)
BALANCED = Balanced(np.arange(30) % 7 % 3, 42)
GOLDEN = [
    # sampler, epoch, positions, samples
    (Order(10, 0), 0, range(10), [2, 9, 8, 4, 1, 6, 3, 5, 0, 7]),
    (Order(10, 0), 1, range(10), [5, 9, 3, 1, 8, 0, 4, 6, 7, 2]),
    (Order(4096, 1), 0, range(4), [500, 2495, 2542, 156]),
    (Order(4097, 1), 0, range(4), [591, 902, 543, 3857]),
    (Order(10**6, 42), 7, [0, 1, 999_999], [254706, 145017, 432179]),
    (Order(2**40 + 15, 42), 3, [0, 1, 2**40], [333766740211, 184663154871, 294223392634]),
    (Order(10**10, -1), 123_456, [0, 5], [5440114786, 6008929704]),
    (Repeat(Order(5, 42), 2), 3, range(10), [0, 3, 2, 4, 1, 3, 4, 2, 1, 0]),
    (BlockOrder(20, 0, 4, 2), 0, [*range(9), 19], [18, 2, 19, 3, 16, 17, 0, 1, 7, 10]),
    (BlockOrder(21, 1, 4, 2), 3, [*range(9), 20], [14, 13, 20, 15, 12, 16, 6, 5, 19, 9]),
    (BLOCKS_42, 1, [0, 1, 500, 999], [481, 483, 547, 412]),
    (BLOCKS_LARGE, 7, [0, 1, 999_999], [858533, 858467, 641745]),
    (
        BlockOrder(10**10, -1, 4096, 256),
        123_456,
        [0, 5, 10**10 - 1],
        [3639070776, 5745079182, 3737710635],
    ),
    (BUCKETS, 0, range(10), [13, 4, 19, 9, 21, 17, 20, 15, 5, 11]),
    (BUCKETS, 10**6, [0, 22], [8, 18]),
    (MIXTURE, 0, range(8), [928, 390, 500, 1128, 1074, 681, 237, 446]),
    (MIXTURE, 3, [0, 500, 1149], [793, 831, 443]),
    (MIXTURE, 10**6, [0, 1], [411, 600]),
    (BALANCED, 0, range(9), [4, 7, 16, 27, 8, 23, 19, 11, 17]),
    (BALANCED, 10**6, [0, 29], [29, 13]),
    (Balanced(np.arange(10_000) % 2, 42), 1, [0, 1, 9999], [9589, 6334, 1490]),
]


@pytest.mark.parametrize(("sampler", "epoch", "positions", "samples"), GOLDEN)
def test_stored_values_are_reproduced(sampler, epoch, positions, samples):
    # A change here reorders the data of every run that is resumed.
    assert sampler(epoch, np.array(positions)).tolist() == samples


@pytest.mark.parametrize(("kind", "sizes"), [(Order, ()), (BlockOrder, (16, 4))])
def test_epochs_and_seeds_have_orders_of_their_own(kind, sizes):
    both, positions = [kind(1000, seed, *sizes) for seed in (0, 1)], np.arange(1000)
    orders = [order(epoch, positions) for order in both for epoch in (0, 1, 2)]
    assert len({tuple(order.tolist()) for order in orders}) == 6


def test_without_shuffling_it_is_the_identity():
    order = Order(10, seed=3, shuffle=False)
    assert everything(order, 4).tolist() == list(range(10))
    assert order.inverse(4, np.array([7])).tolist() == [7]


HUGE = [2**31 - 1, 2**33 - 1, 2**33 + 1, 9_999_999_967, 10**10, 2**40 + 1, 2**61 - 1, MAX_COUNT]


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_are_permuted_at_sampled_positions(count):
    order, random = Order(count, seed=1), np.random.default_rng(0)
    ends = np.arange(1000)
    positions = np.concatenate([ends, count - 1 - ends, random.integers(0, count, 50_000)])
    positions = np.unique(positions)
    samples = order(5, positions)
    assert samples.min() >= 0
    assert samples.max() < count
    assert len(np.unique(samples)) == len(positions)
    assert (order.inverse(5, samples) == positions).all()
    assert (order(5, order.inverse(5, positions)) == positions).all()


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 2**30), st.data())
def test_repeat_goes_through_all_before_it_begins_again(count, times, epoch, data):
    repeat = Repeat(Order(count, 2), times)
    assert repeat.count == count * times
    passes = everything(repeat, epoch).reshape(times, count)
    for number, samples in enumerate(passes):
        assert np.array_equal(samples, everything(Order(count, 2), epoch * times + number))
    check_pure(repeat, epoch, data, st)


@given(st.integers(1, 50), st.lists(st.integers(0, 500)))
def test_draws_go_on_over_the_epochs(count, draws):
    order = Order(count, 1)
    found = draw(order, 3, np.array(draws, dtype=np.int64))
    assert found.tolist() == [int(order(3 + k // count, np.array([k % count]))[0]) for k in draws]


@settings(max_examples=20)
@given(st.sampled_from([0, -1, MAX_COUNT + 1]))
def test_counts_out_of_range_are_refused(count):
    with pytest.raises(DataError, match=f"not {count}"):
        Order(count, 0)


@pytest.mark.parametrize("position", [-1, 10])
@pytest.mark.parametrize(
    "sampler",
    [
        Order(10, 0),
        Repeat(Order(5, 0), 2),
        BlockOrder(10, 0, 2, 1),
        Buckets(Order(10, 0), np.arange(10).__getitem__, 4, 2),
        Mixture({"a": 4, "b": 6}),
        Balanced(np.arange(10) % 2, 0),
    ],
)
def test_positions_outside_are_refused(sampler, position):
    with pytest.raises(IndexError, match="of 10 samples"):
        sampler(0, np.array([position]))
