"""Provides the checks that every sampler must pass."""

import numpy as np


def everything(sampler, epoch=0):
    """Return the samples of a whole epoch, int64 (count,), from one call."""
    return sampler(epoch, np.arange(sampler.count))


def check_permutation(sampler, epoch=0):
    """Check that no sample is missing and none comes twice."""
    assert np.array_equal(np.sort(everything(sampler, epoch)), np.arange(sampler.count))


def check_pure(sampler, epoch, data, st):
    """Check that a sample depends only on its position, not on other positions in the call."""
    whole = everything(sampler, epoch)
    assert whole.dtype == np.int64
    cuts = data.draw(st.lists(st.integers(0, sampler.count), max_size=5).map(sorted), "cuts")
    parts = np.split(np.arange(sampler.count), cuts)
    assert np.array_equal(np.concatenate([sampler(epoch, part) for part in parts]), whole)
    some = data.draw(st.lists(st.integers(0, sampler.count - 1), max_size=20), "positions")
    some = np.array(some, dtype=np.int64)
    assert np.array_equal(sampler(epoch, some), whole[some])
