"""Statistics of a field in one pass, while its shards are written.

Mean and variance of blocks are combined (Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", Stanford CS-79-773, 1979): no cancellation,
whatever the mean, and memory for one block.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from hpctrain.data.index import Statistics
from hpctrain.data.ragged import Array

BLOCK = 2**18  # values


class Moments:
    """Mean, standard deviation and range of the finite values, in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self.square = 0, 0.0, 0.0
        self.low: Any = None
        self.high: Any = None
        self.nonfinite = 0

    def add(self, values: Array) -> None:
        """Take in an array of any shape and real dtype."""
        flat = values.reshape(-1)
        for start in range(0, flat.size, BLOCK):  # bounds the float64 copy
            self._add(flat[start : start + BLOCK])

    def _add(self, values: Array) -> None:
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                self.nonfinite += int(values.size - finite.sum())
                values = values[finite]
        if not values.size:
            return
        low, high = values.min().item(), values.max().item()
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        wide = values.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float64: None, see result
            mean = float(wide.mean())
            wide -= mean
            # Not BLAS's dot: its threads spin when the cores are busy.
            square = float(np.square(wide, out=wide).sum())
        self._combine(wide.size, mean, square)

    def merge(self, other: Self) -> None:
        """Take in what another has seen after this one."""
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        self.low, self.high = min(lows, default=None), max(highs, default=None)
        self.nonfinite += other.nonfinite
        if other.count:
            self._combine(other.count, other.mean, other.square)

    def state(self) -> dict[str, Any]:
        """What `from_state` takes; JSON, and exact."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Continue from `state`."""
        moments = cls()
        vars(moments).update(state)
        return moments

    def _combine(self, count: int, mean: float, square: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        with np.errstate(over="ignore", invalid="ignore"):
            self.square += square + delta * delta * self.count * count / total
            self.mean += delta * count / total
        self.count = total

    def result(self) -> Statistics:
        """Return what was seen so far."""
        mean, std = self.mean, math.sqrt(self.square / max(1, self.count))
        if not self.count or not math.isfinite(std):
            return Statistics(None, None, self.low, self.high, self.nonfinite)
        return Statistics(mean, std, self.low, self.high, self.nonfinite)
