"""The curves of a run: what its journal and its monitors have, in full resolution."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import StorageError
from hpctrain.tracking import columns, samples
from hpctrain.tracking.journal import journal_path, read_all

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The values of a metric, in the order of x: steps, or hours for a metric of a node."""

    x: Numbers
    y: Numbers


@dataclass(frozen=True)
class RunCurves:
    """What is drawn of one run.

    Attributes:
        name: The name of the run directory.
        metrics: The curves over the steps, by metric.
        system: The curves over the hours since the run began, by `NODE/METRIC`.
        restarts: The steps at which an attempt after the first one has logged first.
    """

    name: str
    metrics: dict[str, Curve]
    system: dict[str, Curve]
    restarts: list[int]


def load(run: Path) -> RunCurves:
    """Read the curves of a run.

    Raises:
        StorageError: Nothing was tracked.
    """
    path = journal_path(run)
    if not path.is_file():
        raise StorageError(f"{run}: nothing was tracked (no {path})")
    steps, keys, values = columns.read(path)
    names, codes = np.unique(keys.astype(str), return_inverse=True)
    metrics = {
        str(name): Curve(steps[codes == i].astype(np.float64), values[codes == i])
        for i, name in enumerate(names)
    }
    began, restarts = _attempts(path)
    return RunCurves(run.name, metrics, _system(run, began), restarts)


def smoothed(curve: Curve, weight: float) -> Curve:
    """Return a curve smoothed as TensorBoard does: an average that is corrected at its beginning.

    Args:
        curve: The curve. A value that is not finite is left out of the average.
        weight: Of the average so far, from 0 (not smoothed) to below 1.
    """
    if weight == 0:
        return curve
    average, count, result = 0.0, 0, np.empty_like(curve.y)
    for i, value in enumerate(curve.y):
        if np.isfinite(value):
            average = weight * average + (1 - weight) * value
            count += 1
        result[i] = average / (1 - weight**count) if count else value
    return Curve(curve.x, result)


def _attempts(path: Path) -> tuple[float, list[int]]:
    """Return the time of the first record, and the first step of each later attempt."""
    began, seen, restarts = 0.0, 1, []
    for record in read_all(path):
        body = record.body
        began = began or float(body["time"])
        if body["kind"] == "metrics" and body["attempt"] > seen:
            seen = int(body["attempt"])
            restarts.append(int(body["step"]))
    return began, restarts


def _system(run: Path, began: float) -> dict[str, Curve]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for node, file in samples.files(run).items():
        for sample in samples.read(file):
            for name, value in sample.metrics.items():
                hours, values = found.setdefault(f"{node}/{name}", ([], []))
                hours.append((sample.time - began) / 3600)
                values.append(value)
    return {name: Curve(np.array(x), np.array(y)) for name, (x, y) in sorted(found.items())}


def thinned(curve: Curve, points: int) -> Curve:
    """Return the lowest and the highest value of each of `points` parts: no peak is lost."""
    if len(curve.x) <= 2 * points:
        return curve
    edges = np.linspace(0, len(curve.x), points + 1).astype(int)
    kept: list[int] = []
    for begin, end in itertools.pairwise(edges):
        part = np.nan_to_num(curve.y[begin:end], nan=0.0)
        kept += sorted({begin + int(part.argmin()), begin + int(part.argmax())})
    last = len(curve.x) - 1
    if bisect_left(kept, last) == len(kept):
        kept.append(last)
    return Curve(curve.x[kept], curve.y[kept])
