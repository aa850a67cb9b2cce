from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.buckets import Buckets
from hpctrain.data.samplers.order import Order, Repeat
from tests.data.samplers import check_permutation, check_pure, everything

SIZES = st.tuples(st.integers(1, 500), st.integers(1, 20), st.integers(1, 20))


def build(count, units, size, seed=0):
    lengths = np.random.default_rng(count).integers(1, 50, count)
    return Buckets(Order(count, seed), lengths.__getitem__, units * size, size, seed), lengths


@given(SIZES, st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.data())
def test_every_epoch_is_a_permutation_and_a_pure_function(sizes, seed, epoch, data):
    buckets, _ = build(*sizes, seed)
    check_permutation(buckets, epoch)
    check_pure(buckets, epoch, data, st)


@given(SIZES)
def test_units_are_runs_of_the_sorted_window(sizes):
    count, units, size = sizes
    buckets, lengths = build(*sizes)
    window = units * size
    samples, order = everything(buckets), everything(buckets.sampler)
    for start in range(0, count, window):
        part, given_ = samples[start : start + window], order[start : start + window]
        assert np.array_equal(np.sort(part), np.sort(given_))  # no other samples
        whole = len(part) // size * size
        assert np.array_equal(part[whole:], given_[whole:])  # a last, shorter unit is not sorted
        cut = part[:whole].reshape(-1, size)
        stable = given_[:whole][np.argsort(lengths[given_[:whole]], kind="stable")]
        expected = {tuple(unit) for unit in stable.reshape(-1, size).tolist()}
        assert {tuple(unit) for unit in cut.tolist()} == expected


def test_little_is_padded_and_units_are_mixed():
    rng = np.random.default_rng(0)
    lengths = rng.geometric(0.01, 64_000)
    buckets = Buckets(Order(64_000, 0), lengths.__getitem__, window=6400, size=64)

    def padded(sampler):
        found = lengths[everything(sampler)].reshape(-1, 64)
        return 1 - found.sum() / (found.max(axis=1) * 64).sum()

    assert padded(buckets.sampler) > 0.7
    assert padded(buckets) < 0.08
    means = lengths[everything(buckets)].reshape(-1, 64).mean(axis=1)
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.15
    assert not np.array_equal(everything(buckets, 0), everything(buckets, 1))


def test_it_goes_over_other_samplers():
    buckets = Buckets(Repeat(Order(50, 0), 3), np.arange(50).__getitem__, window=60, size=4)
    samples = everything(buckets, 1)
    assert np.bincount(samples).tolist() == [3] * 50


def test_threads_may_share_it():
    buckets, _ = build(5000, 5, 10)
    expected = everything(buckets, 2)

    def read(seed):
        for positions in np.random.default_rng(seed).integers(0, 5000, (40, 20)):
            assert np.array_equal(buckets(2, positions), expected[positions])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
