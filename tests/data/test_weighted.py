import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.weighted import Balanced
from tests.data.samplers import check_pure, everything

LABELS = st.lists(st.integers(-3, 8), min_size=1, max_size=200).map(np.array)


@given(LABELS, st.integers(-(2**70), 2**70), st.integers(0, 2**30), st.data())
def test_every_run_has_each_class_once(labels, seed, epoch, data):
    sampler = Balanced(labels, seed)
    classes = len(np.unique(labels))
    assert sampler.count == len(labels) // classes * classes
    runs = labels[everything(sampler, epoch)].reshape(-1, classes)
    assert (np.sort(runs, axis=1) == sampler.classes).all()
    check_pure(sampler, epoch, data, st)


@given(LABELS)
def test_within_a_class_no_sample_repeats_before_all_have_come(labels):
    sampler = Balanced(labels, 3)
    rounds = sampler.count // len(sampler.classes)
    epochs = -(-len(labels) // rounds) + 1  # also across the ends of epochs
    samples = np.concatenate([everything(sampler, epoch) for epoch in range(epochs)])
    for label in sampler.classes:
        members = np.flatnonzero(labels == label)
        drawn = samples[labels[samples] == label]
        assert len(drawn) == epochs * rounds
        for start in range(0, len(drawn) - len(members) + 1, len(members)):
            assert np.array_equal(np.sort(drawn[start : start + len(members)]), members)
