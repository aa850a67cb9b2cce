"""Which transforms are found to be random, however they draw."""

import functools
import random

import numpy as np
import pytest
import torch

from hpctrain.data.draws import Draws
from hpctrain.data.randomness import draws_for_batches, draws_for_samples, marked
from hpctrain.data.transforms import WatchedBatches as WatchedBatches
from hpctrain.data.workers.samples import SampleRandom, Watched
from hpctrain.errors import ConfigError
from tests.data import random_transforms as r

SAMPLES = [{"x": np.arange(i + 1, i + 9, dtype=np.uint8), "label": np.int64(i)} for i in range(4)]
BATCHES = [
    {"x": torch.arange(16 * i, 16 * i + 16).view(2, 8), "label": torch.tensor([i, i])}
    for i in range(4)
]


@pytest.mark.parametrize(
    ("transform", "random_"),
    [
        (r.scale, False),
        (functools.partial(r.scale), False),
        (r.rarely, False),  # nobody can know; it is watched
        (r.flip, True),
        (functools.partial(r.flip), True),
        (lambda sample, draws: r.flip(sample, draws), True),
        (r.Flip(0.5), True),
        (r.Flip(0.5).__call__, True),
        (r.NotMarked(), True),
        (r.spawned, True),
        (r.of_numpy, True),
        (r.of_python, True),
        (r.of_torch, True),
        (r.of_its_own, True),
        (r.Every(), True),
        (r.flip_and_scale, True),
        (r.noise, True),
    ],
)
def test_of_samples(transform, random_):
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    assert draws_for_samples(transform, SAMPLES) is random_
    assert [s["x"][0] for s in SAMPLES] == [1, 2, 3, 4]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002


@pytest.mark.parametrize(
    ("transform", "random_"),
    [
        (r.batch_scale, False),
        (r.batch_rarely, False),
        (r.batch_flip, True),
        (r.batch_of_torch, True),
        (r.batch_noise, True),
    ],
)
def test_of_batches(transform, random_):
    assert draws_for_batches(transform, BATCHES) is random_


def test_marks():
    assert marked(r.Marked(0.5)) is True
    assert marked(r.marked) is True
    assert marked(functools.partial(functools.partial(r.marked))) is True
    assert marked(r.Marked(0.5).__call__) is None
    assert marked(r.NotMarked()) is None
    assert marked(r.flip) is None


def test_what_draws_later_is_an_error():
    stream, watched = SampleRandom(), Watched(r.rarely, "data.transforms[2]")
    for i, sample in enumerate(SAMPLES):
        assert watched(sample, stream.at(0, 0, i)) is sample
    with pytest.raises(ConfigError, match=r"data\.transforms\[2\] draws random .* data\.val_tr"):
        watched(SAMPLES[0] | {"label": 99}, stream.at(0, 0, 9))
    for spawning in (r.spawned, lambda sample, random: {**sample, "n": random.bytes(1)}):
        with pytest.raises(ConfigError, match="draws random numbers"):
            Watched(spawning, "data.transforms[0]")(SAMPLES[0], SampleRandom().at(0, 0, 0))
    batches = WatchedBatches(r.batch_rarely, "data.batch_transforms[0]")
    assert batches(BATCHES[0], Draws(0, 0, np.arange(2))) is BATCHES[0]
    with pytest.raises(ConfigError, match=r"data\.val_batch_transforms=\[\] for nothing"):
        batches(BATCHES[0] | {"label": torch.tensor([99, 0])}, Draws(0, 0, np.arange(2)))
