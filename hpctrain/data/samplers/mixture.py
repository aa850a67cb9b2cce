"""Several data sets mixed into one stream by weights.

    counts    web 1000, books 100, code 50          index space: web 0-999, books 1000-1099, code …
    weights   web 0.5,  books 0.25, code 0.25
    positions web code web books web code web books …        each at an even distance

Every position belongs to a data set and is one draw from it: draw k from a data set of n samples is
position k % n of its own epoch k // n. A table of `period` positions, which repeats, says which
data set a position belongs to. So everything is a pure function of the position, and any range of
positions holds each data set's share to within a few draws.

    >>> mixture = Mixture({"web": 1000, "books": 100}, {"web": 3, "books": 1}, seed=0)
    >>> mixture.shares
    {'web': 0.75, 'books': 0.25}

For exactly one epoch of each data set, shuffle them together instead, with one `Order` over the sum
of their counts.
"""

import math
from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.base.errors import ConfigError
from hpctrain.data.samplers.order import Order, Sampler, check_positions, draw
from hpctrain.data.samplers.permutation import groups, make_key
from hpctrain.data.shards.types import Int64s

_PERIOD = 65_536
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Mixture:
    """Draws from each data set its share of every range of positions.

    The data sets, of `counts` samples each, lie end to end in one index space, as in `Concat`. Of
    the weights, which the config has checked, only ratios matter, and a missing one is 0; without
    `weights` they are the counts.

    `samplers` are those of some of the data sets; others are shuffled by an `Order`. The count of a
    sampler is smaller for a subset, and larger for a repeated data set. An epoch has the sum of the
    counts; at its end the data sets simply go on in their own epochs. `shares` are the weights
    after rounding to multiples of 1 / period. Memory: 8 * period bytes.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        *,
        samplers: Mapping[str, Sampler] | None = None,
        period: int = _PERIOD,
    ) -> None:
        samplers = samplers or {}
        sizes = dict(counts) | {name: sampler.count for name, sampler in samplers.items()}
        if weights is None:
            largest = max(sizes.values())
            weights = {name: size / max(largest, 1) for name, size in sizes.items()}
        quotas = _quotas(sizes, weights, period)
        self.count = sum(sizes.values())
        self.shares = {name: quota / period for name, quota in quotas.items()}
        self._quotas = np.array(list(quotas.values()))
        self._firsts = [sum(list(counts.values())[:i]) for i in range(len(counts))]
        self._samplers = [
            samplers.get(name) or Order(max(size, 1), make_key(seed, _number(name)))
            for name, size in counts.items()
        ]
        self._sets, self._ordinals = _interleave(self._quotas)

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`, in the joint index space; see `Sampler`."""
        # Counted from the beginning of a period, so that a late epoch does not overflow.
        first, offset = divmod(epoch * self.count, len(self._sets))
        periods, slots = np.divmod(check_positions(positions, self.count) + offset, len(self._sets))
        samples = np.empty_like(periods)
        for number, rows in groups(self._sets[slots].astype(np.int64)):
            draws = (first + periods[rows]) * self._quotas[number] + self._ordinals[slots[rows]]
            samples[rows] = draw(self._samplers[number], 0, draws) + self._firsts[number]
        return samples


def _quotas(counts: Mapping[str, int], weights: Mapping[str, float], period: int) -> dict[str, int]:
    """Return whole numbers that add up to `period`, in proportion to the weights."""
    for name, weight in weights.items():
        if weight and not counts[name]:
            raise ConfigError(f"the weight of {name!r} is {weight}, but it has no samples")
    largest = max(weights.values())
    scaled = {name: weights.get(name, 0.0) / largest for name in counts}  # a finite sum
    exact = {name: weight / sum(scaled.values()) * period for name, weight in scaled.items()}
    quotas = {name: math.floor(quota) for name, quota in exact.items()}
    remainders = sorted(exact, key=lambda name: quotas[name] - exact[name])  # stable
    for name in remainders[: period - sum(quotas.values())]:
        quotas[name] += 1
    for name, quota in quotas.items():
        if weights.get(name) and not quota:
            raise ConfigError(
                f"the weight of {name!r} is {exact[name] / period:.3g} of the sum, and rounds to "
                f"none of {period} positions; give it 0 or more, or raise the period"
            )
    return quotas


def _interleave(quotas: Int64s) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the data set of each position of a period, and how many of its draws came before.

    Draw k of a data set with quota q belongs at (k + phase) / q of the period. The phases differ,
    so that data sets with equal quotas do not all come at the same time.
    """
    phases = (np.arange(len(quotas)) + 0.5) * _GOLDEN_RATIO % 1
    sets = np.repeat(np.arange(len(quotas)), quotas)
    ordinals = np.arange(len(sets)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    order = np.argsort((ordinals + phases[sets]) / quotas[sets], kind="stable")
    return sets[order].astype(np.int32), ordinals[order].astype(np.int32)


def _number(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())
