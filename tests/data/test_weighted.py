import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.weighted import Balanced, Weighted
from hpctrain.errors import DataError
from tests.data.samplers import check_pure, everything

LABELS = st.lists(st.integers(-3, 8), min_size=1, max_size=200).map(np.array)


@given(
    st.lists(st.floats(0, 1e308), min_size=1, max_size=100).filter(any),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
    st.integers(1, 500),
    st.data(),
)
def test_weighted_draws_only_what_has_weight(weights, seed, epoch, count, data):
    weights = np.array(weights)
    sampler = Weighted(weights, seed, count)
    samples = everything(sampler, epoch)
    assert ((samples >= 0) & (samples < len(weights))).all()
    assert (weights[samples] > 0).all()
    check_pure(sampler, epoch, data, st)


def test_weighted_draws_in_proportion():
    weights = np.array([1, 0, 2, 3, 0, 4, 0])
    count = 100_000
    observed = np.bincount(everything(Weighted(weights, 0, count)), minlength=7)
    expected = weights / weights.sum() * count
    drawn = weights > 0
    assert not observed[~drawn].any()
    # The 99.99 % quantile of chi-square with 3 degrees of freedom.
    assert ((observed - expected)[drawn] ** 2 / expected[drawn]).sum() < 21.1


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1.0, 1e300])
def test_only_ratios_of_weights_matter(scale):
    weights = np.array([1.0, 2.0, 4.0]) * scale
    assert np.bincount(everything(Weighted(weights, 0, 7000))).min() > 800


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2, -0.5, -1], r"weight 2 is -0.5 \(2 such in all\)"),
        ([np.nan, 1], "weight 0 is nan"),
        ([1, np.inf], "weight 1 is inf"),
        ([0, 0], "2 weights are all 0"),
        ([], r"\[0\]"),
        ([[1.0]], r"float64 \[1, 1\]"),
        (["a"], "one for each"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Weighted(np.array(weights), 0)
    with pytest.raises(DataError, match="an epoch of 0 draws"):
        Weighted(np.ones(3), 0, count=0)


@given(LABELS, st.integers(-(2**70), 2**70), st.integers(0, 2**30), st.data())
def test_every_run_has_each_class_once(labels, seed, epoch, data):
    sampler = Balanced(labels, seed)
    classes = len(np.unique(labels))
    assert sampler.count == len(labels) // classes * classes
    runs = labels[everything(sampler, epoch)].reshape(-1, classes)
    assert (np.sort(runs, axis=1) == sampler.classes).all()
    check_pure(sampler, epoch, data, st)


@given(LABELS, st.integers(1, 50))
def test_within_a_class_no_sample_repeats_before_all_have_come(labels, rounds):
    sampler = Balanced(labels, 3, count=rounds * len(np.unique(labels)))
    epochs = -(-len(labels) // rounds) + 1  # also across the ends of epochs
    samples = np.concatenate([everything(sampler, epoch) for epoch in range(epochs)])
    for label in sampler.classes:
        members = np.flatnonzero(labels == label)
        drawn = samples[labels[samples] == label]
        assert len(drawn) == epochs * rounds
        for start in range(0, len(drawn) - len(members) + 1, len(members)):
            assert np.array_equal(np.sort(drawn[start : start + len(members)]), members)


@pytest.mark.parametrize(
    ("labels", "count", "message"),
    [
        ([0, 1, 2], 4, "4 draws cannot hold 3 classes"),
        ([0, 1, 2], 0, "0 draws"),
        ([], None, "at least one"),
        ([0.5], None, "float64"),
        ([[1]], None, r"int64 \[1, 1\]"),
    ],
)
def test_invalid_labels_are_refused(labels, count, message):
    with pytest.raises(DataError, match=message):
        Balanced(np.array(labels), 0, count)
