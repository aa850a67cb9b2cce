"""Statistics of a field in one pass, while its shards are written.

Mean and variance of blocks are combined (Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", Stanford CS-79-773, 1979): no cancellation, whatever the
mean is, and the memory of one block.

In a block, deviations are taken from a pivot p, the mean of every 64th value. With the block's mean
m, the variance is mean((x - p)²) - (m - p)². As p is the mean of a 64th of the block, (m - p)² is
at most 64 times the variance (Jensen): at most six bits are lost, and the block's mean needs no
pass of its own. Sums of 8-bit integers are exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from hpctrain.base.files.record import Count
from hpctrain.data.shards.index import Lengths, Statistics
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array

BLOCK = 2**17  # values of a block: their float64 copy stays in the cache
_PIVOT = 64  # the pivot is the mean of every 64th value
MOST_CLASSES = 1000  # of a field
_MOST_COUNTS = 2**20  # classes of all fields together
_SPAN = 2**16  # largest range of integers that is counted in a table


@dataclass
class Moments:
    """Running statistics of a field, in float64; JSON stores them without loss.

    `square` is the sum of the squared deviations from the mean. `classes` says how often each value
    occurs; None if a sample is not one integer, or there are more than `most` values, of which
    there are fewer in a data set of many fields. `lengths` are those of variable-length samples.
    """

    most: Count = MOST_CLASSES
    count: Count = 0
    mean: float = 0.0
    square: float = 0.0
    low: int | float | None = None
    high: int | float | None = None
    nonfinite: Count = 0
    nan: Count = 0
    classes: dict[int, Count] | None = field(default_factory=dict)
    lengths: "Moments | None" = None
    total: Count = 0

    @classmethod
    def among(cls, fields: int) -> Self:
        """Return the statistics of no samples yet, of one of so many fields."""
        return cls(max(2, min(MOST_CLASSES, _MOST_COUNTS // fields)))

    def add(self, samples: Array | Ragged) -> None:
        """Add samples of any shape and real dtype."""
        values = samples.values if isinstance(samples, Ragged) else samples
        if isinstance(samples, Ragged):
            if self.lengths is None:
                self.lengths = Moments()
            self.lengths.add(samples.lengths)
            self.total += len(values)
        if values.dtype.kind == "f" or values.ndim != 1 or isinstance(samples, Ragged):
            self.classes = None
        flat = values.reshape(-1)
        wide = np.empty(min(flat.size, BLOCK))
        for start in range(0, flat.size, BLOCK):
            self._add(flat[start : start + BLOCK], wide)

    def _add(self, values: Array, wide: Array) -> None:
        if values.dtype == np.float16:
            values = values.astype(np.float32)  # arithmetic of float16 is slow
        with np.errstate(invalid="ignore"):
            low, high = values.min().item(), values.max().item()  # NaN if one value is
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = values[np.isfinite(values)]
            self.nonfinite += values.size - finite.size
            self.nan += int(np.isnan(values).sum())
            if finite.size:
                self._add(finite, wide)
            return
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        if self.classes is not None:
            self._add_classes(_counts(values, low, high, self.most))
        moments = _of_bytes(values, low) if values.itemsize == 1 else _of_values(values, wide)
        self._combine(values.size, *moments)

    def merge(self, other: Self) -> None:
        """Add the statistics of the samples that follow."""
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        self.low, self.high = min(lows, default=None), max(highs, default=None)
        self.nonfinite += other.nonfinite
        self.nan += other.nan
        self._add_classes(other.classes)
        if other.lengths is not None:
            if self.lengths is None:
                self.lengths = Moments()
            self.lengths.merge(other.lengths)
            self.total += other.total
        if other.count:
            self._combine(other.count, other.mean, other.square)

    def _add_classes(self, classes: Mapping[int, int] | None) -> None:
        if self.classes is None or classes is None:
            self.classes = None
            return
        for value, count in classes.items():
            self.classes[value] = self.classes.get(value, 0) + count
        if len(self.classes) > self.most:
            self.classes = None

    def _combine(self, count: int, mean: float, square: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        with np.errstate(over="ignore", invalid="ignore"):
            self.square += square + delta * delta * self.count * count / total
            self.mean += delta * count / total
        self.count = total

    def result(self) -> Statistics:
        """Return the statistics of all samples added so far."""
        mean, std = self._mean_std()
        lengths = None
        if self.lengths is not None:
            low: Any = self.lengths.low
            high: Any = self.lengths.high
            lengths = Lengths(*self.lengths._mean_std(), low, high, self.total)
        classes = dict(sorted(self.classes.items())) if self.classes else None
        return Statistics(
            *(mean, std, self.low, self.high, self.nonfinite, self.nan, classes, lengths)
        )

    def _mean_std(self) -> tuple[float | None, float | None]:
        std = math.sqrt(self.square / max(1, self.count))
        return (self.mean, std) if self.count and math.isfinite(std) else (None, None)


def _of_values(values: Array, wide: Array) -> tuple[float, float]:
    """Return mean and sum of squared deviations; `wide` is scratch memory, float64."""
    wide = wide[: values.size]
    np.copyto(wide, values)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # beyond float64 they become None, see result
        pivot = float(wide[::_PIVOT].mean())
        wide -= pivot
        sum_ = float(wide.sum())
        # Not BLAS's dot: its threads spin when the cores are busy.
        squares = float(np.square(wide, out=wide).sum())
        square = squares - sum_ * (sum_ / values.size)
    return pivot + sum_ / values.size, max(square, 0.0) if square == square else square


def _of_bytes(values: Array, low: int) -> tuple[float, float]:
    """Do the same as `_of_values` for 8-bit integers, of which `low` is the least."""
    table = np.bincount(values.astype(np.int64) - low)
    which = np.arange(low, low + len(table))
    sum_, squares = int(table @ which), int(table @ which**2)
    return sum_ / values.size, (squares * values.size - sum_ * sum_) / values.size


def _counts(values: Array, low: int, high: int, most: int) -> dict[int, int] | None:
    """Return how often each integer occurs; None if there are more than `most`."""
    if high - low < _SPAN:
        table = np.bincount(values.astype(np.int64) - low)
        which = np.flatnonzero(table)
        found, counts = which + low, table[which]
    else:
        found, counts = np.unique(values, return_counts=True)
    if len(found) > most:
        return None
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
