import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.order import MAX_COUNT, SMALL, Order
from hpctrain.errors import DataError


def everything(order, epoch):
    return order(epoch, np.arange(order.count))


@pytest.mark.parametrize("count", [*range(1, 70), 127, 128, 129, 997])
def test_small_counts_are_permuted(count):
    order = Order(count, seed=5)
    for epoch in range(3):
        samples = everything(order, epoch)
        assert sorted(samples.tolist()) == list(range(count))
        assert order.inverse(epoch, samples).tolist() == list(range(count))


@pytest.mark.parametrize("count", [SMALL - 1, SMALL, SMALL + 1, 8191, 8192, 8193, 65_537, 100_003])
def test_larger_counts_are_permuted(count):
    order = Order(count, seed=5)
    samples = everything(order, 1)
    assert (np.bincount(samples, minlength=count) == 1).all()
    assert (order.inverse(1, samples) == np.arange(count)).all()


@given(
    count=st.integers(1, MAX_COUNT),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
def test_the_inverse_undoes_it(count, seed, epoch, data):
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


GOLDEN = [
    # count, seed, epoch, positions, samples
    (10, 0, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 9, 8, 4, 1, 6, 3, 5, 0, 7]),
    (10, 0, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 9, 3, 1, 8, 0, 4, 6, 7, 2]),
    (4096, 1, 0, [0, 1, 2, 3], [500, 2495, 2542, 156]),
    (4097, 1, 0, [0, 1, 2, 3], [591, 902, 543, 3857]),
    (1000000, 42, 7, [0, 1, 999999], [254706, 145017, 432179]),
    (1099511627791, 42, 3, [0, 1, 1099511627776], [333766740211, 184663154871, 294223392634]),
    (10000000000, -1, 123456, [0, 5], [5440114786, 6008929704]),
]


@pytest.mark.parametrize(("count", "seed", "epoch", "positions", "samples"), GOLDEN)
def test_golden_values_are_fixed_for_ever(count, seed, epoch, positions, samples):
    # A change here reorders the data of every run that is resumed.
    assert Order(count, seed)(epoch, np.array(positions)).tolist() == samples


def test_seeds_epochs_and_counts_give_unrelated_orders():
    first = everything(Order(1000, 0), 0)
    for other in (Order(1000, 1), Order(1000, 2**32)):
        assert (everything(other, 0) == first).mean() < 0.02
    assert (everything(Order(1000, 0), 1) == first).mean() < 0.02
    # (seed + 1, epoch) is not (seed, epoch + 1).
    assert (everything(Order(1000, 1), 0) == everything(Order(1000, 0), 1)).mean() < 0.02
    assert (
        Order(10**6, 0)(0, np.arange(1000)) == Order(10**6 + 1, 0)(0, np.arange(1000))
    ).sum() < 3


def test_without_shuffling_it_is_the_identity():
    order = Order(10, seed=3, shuffle=False)
    assert everything(order, 4).tolist() == list(range(10))
    assert order.inverse(4, np.array([7])).tolist() == [7]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_tiny_counts_take_every_permutation_equally_often(count):
    epochs = 200 * [1, 1, 2, 6, 24, 120][count]
    order = Order(count, seed=0)
    seen, times = np.unique(
        [everything(order, epoch) for epoch in range(epochs)], axis=0, return_counts=True
    )
    assert len(seen) == [1, 1, 2, 6, 24, 120][count]
    # Chi-square, 99.99 % at 119 degrees of freedom is 184.
    assert ((times - 200.0) ** 2 / 200).sum() < 184


def chi_square(observed):
    """In standard deviations from its expectation."""
    expected = observed.sum() / observed.size
    free = observed.size - 1
    return (((observed - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free)


@pytest.mark.parametrize("count", [4099, 2**16 - 1, 2**16, 2**16 + 1, 99_991, 2**20 + 7])
def test_positions_and_samples_are_independent(count):
    order = Order(count, seed=11)
    for epoch in range(3):
        samples = everything(order, epoch)
        bins = 32
        table = np.zeros((bins, bins))
        np.add.at(table, (np.arange(count) * bins // count, samples * bins // count), 1)
        assert abs(chi_square(table)) < 5
        # Neighbours: neither runs nor stripes in the steps between them.
        steps = np.diff(samples) % count
        assert abs(chi_square(np.bincount(steps * 64 // count, minlength=64))) < 5
        for low_bits in (2, 8, 64):
            assert abs(chi_square(np.bincount(steps % low_bits, minlength=low_bits))) < 6
        # Serial correlation at several lags is that of noise.
        centred = samples - samples.mean()
        for lag in (1, 2, 64, 1024):
            correlation = (centred[lag:] * centred[:-lag]).mean() / centred.var()
            assert abs(correlation) * np.sqrt(count) < 5


def test_fixed_points_and_short_cycles_are_as_rare_as_by_chance():
    count, epochs = 5003, 200
    order = Order(count, seed=2)
    fixed, pairs = 0, 0
    for epoch in range(epochs):
        samples = everything(order, epoch)
        places = np.arange(count)
        fixed += int((samples == places).sum())
        pairs += int(((samples[samples] == places) & (samples != places)).sum()) // 2
    assert 150 < fixed < 250  # 200 expected, Poisson
    assert 60 < pairs < 140  # 100 expected


@pytest.mark.parametrize("count", [10**10, 2**40 + 1, 2**61 - 1])
def test_huge_counts_are_uniform(count):
    samples = Order(count, seed=1)(0, np.arange(200_000))
    assert len(np.unique(samples)) == 200_000
    assert abs(chi_square(np.bincount((samples / count * 256).astype(int), minlength=256))) < 5
    assert abs(chi_square(np.bincount(samples % 256, minlength=256))) < 5


@settings(max_examples=20)
@given(st.sampled_from([0, -1, MAX_COUNT + 1]))
def test_counts_that_are_no_counts_are_refused(count):
    with pytest.raises(DataError, match=f"not {count}"):
        Order(count, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position):
    with pytest.raises(IndexError, match="of 10 samples"):
        Order(10, 0)(0, np.array([position]))
