import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.mixture import Mixture
from hpctrain.data.samplers.order import Order, draw
from hpctrain.data.samplers.subset import Subset
from hpctrain.errors import ConfigError
from tests.data.samplers import check_pure, everything

SETS = st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 10)), min_size=1, max_size=6)


def build(sets, **options):
    counts = {f"set{i}": count for i, (count, _) in enumerate(sets)}
    weights = {f"set{i}": weight for i, (_, weight) in enumerate(sets)}
    return Mixture(counts, weights, 3, **{"period": 1024, **options})


def set_of(mixture, counts, samples):
    return np.searchsorted(np.cumsum(counts), samples, side="right")


@given(SETS, st.integers(0, 2**30), st.data())
@settings(max_examples=50)
def test_it_is_a_function_of_the_position_alone(sets, epoch, data):
    check_pure(build(sets), epoch, data, st)


@given(SETS, st.integers(0, 1000))
@settings(max_examples=50)
def test_quotas_are_exact_in_every_period(sets, period):
    counts, weights = np.array(sets).T
    mixture = build(sets)
    shares = np.array(list(mixture.shares.values()))
    assert shares.sum() == 1
    assert np.abs(shares - weights / weights.sum()).max() <= 1 / 1024
    samples = draw(mixture, 0, np.arange(1024 * period, 1024 * (period + 1)))
    drawn = np.bincount(set_of(mixture, counts, samples), minlength=len(sets))
    assert np.array_equal(drawn, shares * 1024)


@given(SETS)
@settings(max_examples=20)
def test_each_data_set_runs_its_own_epochs(sets):
    # Each data set has complete epochs of its own, across the ends of the mixture's epochs.
    counts = [size for size, _ in sets]
    mixture = build(sets)
    epochs = max(1, 3000 // mixture.count)
    samples = np.concatenate([everything(mixture, epoch) for epoch in range(epochs)])
    first = 0
    for size in counts:
        own = samples[(samples >= first) & (samples < first + size)] - first
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(whole, axis=1) == np.arange(size)).all()
        rest = own[whole.size :]
        assert len(np.unique(rest)) == len(rest)
        first += size


def test_without_weights_the_counts_weigh():
    mixture = Mixture({"large": 10_000, "small": 100, "none": 0})
    assert mixture.shares["small"] == pytest.approx(1 / 101, abs=1 / 65_536)
    assert mixture.count == 10_100


def test_any_sampler_can_be_inside():
    blocks, plain = BlockOrder(1000, 5, 10, 4), Order(50, 0, shuffle=False)
    mixture = Mixture(
        {"a": 1000, "b": 50, "c": 9}, {"a": 2, "b": 1, "c": 1}, samplers={"a": blocks, "b": plain}
    )
    samples = draw(mixture, 0, np.arange(2000))
    assert np.array_equal(samples[samples < 1000], everything(blocks))
    own = samples[(samples >= 1000) & (samples < 1050)]
    assert np.array_equal(own, 1000 + np.arange(500) % 50)


def test_a_subset_weighs_by_its_own_count():
    tenth = Subset(Order(100, 0), np.arange(0, 1000, 10))
    mixture = Mixture({"a": 300, "b": 1000}, samplers={"b": tenth})
    assert mixture.shares == {"a": 0.75, "b": 0.25}
    samples = everything(mixture)
    assert len(samples) == 400
    assert np.array_equal(np.sort(samples), [*range(300), *range(300, 1300, 10)])


def test_data_sets_of_equal_size_have_different_orders_that_stay():
    samples = everything(Mixture({"a": 1000, "b": 1000}, seed=1))
    a, b = samples[samples < 1000], samples[samples >= 1000] - 1000
    assert (a == b).mean() < 0.01
    # Another data set changes how often these two come, but not their order.
    other = everything(Mixture({"z": 500, "a": 1000, "b": 1000}, seed=1)) - 500
    found = other[(other >= 0) & (other < 1000)]
    shorter = min(len(a), len(found))
    assert np.array_equal(found[:shorter], a[:shorter])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1, "empty": 1}, "weight of 'empty' is 1, but it has no samples"),
        ({"a": 1, "b": 1e-6}, "weight of 'b' is 1e-06 of the sum"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": 10, "b": 20, "empty": 0}, weights)
