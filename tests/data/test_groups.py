"""Groups of samples are divided as well as possible, and no group is in two parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.samplers.groups import divide
from hpctrain.data.shards.ragged import hash_rows
from hpctrain.engine.building.chosen_samples import held_out
from hpctrain.errors import DataError


def keys_of(sizes, seed=0):
    """Return the key of each sample of groups of these sizes, in any order."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return hash_rows(np.random.default_rng(seed).permutation(groups))


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 30), min_size=5, max_size=60),
    st.sampled_from([[0.8, 0.2], [0.9, 0.1], [0.6, 0.2, 0.2], [0.2] * 5]),
    st.integers(0, 3),
)
def test_no_group_is_divided_and_no_part_is_empty(sizes, fractions, seed):
    keys = keys_of(sizes)
    parts = divide(keys, fractions, seed)
    assert {*parts.tolist()} == {*range(len(fractions))}
    assert len({*zip(keys.tolist(), parts.tolist(), strict=True)}) == len(sizes)
    assert (divide(keys, fractions, seed) == parts).all()
    # The order of the samples says nothing.
    assert (divide(keys[::-1], fractions, seed) == parts[::-1]).all()
    for part, fraction in enumerate(fractions):
        assert abs((parts == part).sum() - fraction * len(keys)) <= 2 * max(sizes)


def test_the_fractions_are_met_and_the_seed_decides():
    keys = keys_of(np.random.default_rng(1).integers(5, 60, 40))
    found = [divide(keys, [0.8, 0.2], seed) for seed in range(3)]
    for parts in found:
        assert abs((parts == 1).mean() - 0.2) < 0.01
    assert not (found[0] == found[1]).all()
    # Groups of all sizes are in the small part: it is no choice of small ones.
    sizes = [np.unique(keys[parts == 1], return_counts=True)[1] for parts in found]
    assert np.concatenate(sizes).max() > 40


def test_each_part_has_its_share_of_each_class():
    random = np.random.default_rng(0)
    patients = np.repeat(np.arange(60), 10)
    ill = random.random(60)[patients] < 0.2  # all samples of a patient have one class
    parts = divide(hash_rows(patients), [0.75, 0.25], strata=ill.astype(np.int64))
    for label in (False, True):
        assert abs((parts[ill == label] == 1).mean() - 0.25) < 0.06


def test_too_few_groups():
    with pytest.raises(DataError, match="2 groups are too few for 3 parts"):
        divide(keys_of([5, 5]), [0.5, 0.3, 0.2])


@settings(max_examples=30)
@given(st.integers(2, 7), st.integers(0, 90), st.integers(0, 2), st.booleans())
def test_each_sample_is_in_one_fold(folds, more, seed, grouped):
    count = folds + more
    groups = keys_of([1] * folds + [3] * more) if grouped else None
    count = count if groups is None else len(groups)
    found = np.array([held_out((k, folds), count, seed, groups) for k in range(folds)])
    assert (found.sum(0) == 1).all()
    if groups is None:
        assert np.ptp(found.sum(1)) <= 1
    else:
        for fold in found:
            assert not {*groups[fold].tolist()} & {*groups[~fold].tolist()}
