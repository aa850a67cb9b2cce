"""Which transforms are random: an evaluation that would use one is refused.

A transform whose attribute `random` is a bool says it. Any other is called a few times for each of
the first samples, with other random numbers: it is random if it draws from the generator that it is
given, or from the global ones of Python, numpy or torch, and if it gives two results for a sample.
One that first draws later, for a sample that was not tried, ends the evaluation with an error
(`hpctrain.data.workers.samples.Watched`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpctrain.data.draws import Draws
from hpctrain.data.generators import same_generators, states
from hpctrain.data.shards.types import Batch
from hpctrain.data.workers.samples import SampleRandom, has_drawn

SAMPLES = 4  # samples that are tried, and batches
ROWS = 2  # samples of such a batch
_CALLS = 4  # for each


def marked(transform: Any) -> bool | None:
    """Return what the attribute `random`, if it is a bool, of a transform or its function says."""
    while isinstance(transform, functools.partial) and "random" not in vars(transform):
        transform = transform.func
    value = getattr(transform, "random", None)
    return value if isinstance(value, bool) else None


def draws_for_samples(transform: Any, samples: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a transform of single samples is random for some of these."""
    stream = SampleRandom()

    def call(number: int, trial: int) -> tuple[bool, Any]:
        given = {name: np.array(value)[()] for name, value in samples[number].items()}
        generator = stream.at(trial, 0, number)
        result = transform(given, generator)
        return has_drawn(generator), result

    return _is_random(call, len(samples))


def draws_for_batches(transform: Any, batches: Sequence[Batch]) -> bool:
    """Return whether a transform of whole batches is random for some of these."""

    def call(number: int, trial: int) -> tuple[bool, Any]:
        given = {name: value.clone() for name, value in batches[number].items()}
        draws = Draws(trial, 0, np.arange(len(next(iter(given.values())))))
        result = transform(given, draws)
        return draws.drawn > 0, result

    return _is_random(call, len(batches))


def _is_random(call: Callable[[int, int], tuple[bool, Any]], count: int) -> bool:
    with same_generators():
        before = states()
        for number in range(count):
            drawn, first = call(number, 0)
            others = (call(number, trial) for trial in range(1, _CALLS))
            if drawn or any(drew or _bytes(other) != _bytes(first) for drew, other in others):
                return True
        return any(not torch.equal(before[name], each) for name, each in states().items())


def _bytes(result: Any) -> dict[str, bytes]:
    """Return the bytes of each field; nothing of what is no sample, which others refuse."""
    found = {}
    for name, value in result.items() if isinstance(result, Mapping) else ():
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = np.asarray(value).tobytes()
    return found
