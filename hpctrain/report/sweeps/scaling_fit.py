"""Scaling: how much faster more ranks are, what holds them back, and what still more would give.

The time of a step with n times the ranks of the smallest run is fitted, with parts that are not
negative, to

    strong: serial + parallel / n + communication log2(n)      (Amdahl 1967, and a tree's depth)
    weak:   work + communication log2(n)                        (Gustafson 1988)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from scipy.optimize import nnls

from hpctrain.report.account.run_account import RunAccount
from hpctrain.runs.sweep_overrides import flat

_GOOD, _ACCEPTABLE = 0.95, 0.81
_LEAST_REPORTS = 3  # the first one has the warm-up
_MORE = (2, 4, 8)
# Keys that a series may change, and those that say where and how a run is kept.
_FREE = (
    *("launch.", "parallel.", "network.", "site.", "tracking.", "checkpoint.", "monitor."),
    *("name", "output_dir", "train.accumulate", "train.micro_batch_size"),
)
_PARTS = {
    "compute": "computation, which did not shrink with the ranks",
    "communication": "communication: ranks wait for each other",
    "data_wait": "data: ranks wait for their batches",
}


@dataclass(frozen=True)
class _Point:
    """The runs with one number of ranks: median samples per second, seconds of a step by part."""

    ranks: int
    nodes: int
    rate: float
    step_s: float
    parts: dict[str, float]


@dataclass
class Scaling:
    """A scaling series."""

    kind: str  # `strong` or `weak`
    points: list[_Point] = field(default_factory=list)  # by ranks
    left_out: list[str] = field(default_factory=list)  # runs that are not in it, and why
    # Seconds of a step of the smallest run by part; empty with less than two points.
    fit: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, accounts: Sequence[RunAccount]) -> Scaling | None:
        """Return the series of runs; None if they are none."""
        kinds = {account.value("scaling") for account in accounts}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind not in ("strong", "weak"):
            return None
        series = cls(kind)
        comparable = _comparable(accounts, series)
        groups: dict[int, list[tuple[RunAccount, float]]] = {}
        for account in comparable:
            if (rate := _rate(account, series)) is not None:
                ranks = account.spans[-1].facts.world_size
                groups.setdefault(ranks, []).append((account, rate))
        series.points = [_point(ranks, groups[ranks]) for ranks in sorted(groups)]
        series.fit = _fit(series)
        return series

    def speedup(self, point: _Point) -> float:
        """Return how many times more samples per second than the smallest run."""
        return point.rate / self.points[0].rate

    def efficiency(self, point: _Point) -> float:
        """Return the speed-up divided by the factor of the ranks."""
        return self.speedup(point) / (point.ranks / self.points[0].ranks)

    def predicted(self, factor: float) -> tuple[float, float]:
        """Return speed-up and efficiency of the fit at so many times the ranks of the smallest."""
        work = factor if self.kind == "weak" else 1.0
        speedup = work * _step_s(self.fit, 1.0) / _step_s(self.fit, factor)
        return speedup, speedup / factor

    def lines(self) -> list[str]:
        """Return what the series says: table, fit, verdict, and what more would give."""
        if len(self.points) < 2:
            return [
                f"{self.kind} scaling: it needs runs with two numbers of ranks",
                *self.left_out,
            ]
        found = [f"{self.kind} scaling, from {self.points[0].ranks} ranks:"]
        found += [
            f"{point.ranks} ranks on {point.nodes} nodes: {point.rate:,.0f} samples/s, speed-up "
            f"{self.speedup(point):.2f} (ideal {point.ranks / self.points[0].ranks:g}), "
            f"efficiency {100 * self.efficiency(point):.0f}%"
            for point in self.points
        ]
        return [*found, self._fitted(), self.verdict, *self._more(), *self.left_out]

    def _fitted(self) -> str:
        parts = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in self.fit.items())
        text = f"fitted step of the smallest run: {parts}"
        if self.kind == "strong" and len(self.points) == 2:
            text += " (two points do not tell serial work from communication)"
        return text

    @property
    def verdict(self) -> str:
        """Whether the largest run is efficient, and if not, what the bottleneck is."""
        last = self.points[-1]
        value = self.efficiency(last)
        text = f"verdict: {100 * value:.0f}% with {last.ranks} ranks is"
        if value >= _GOOD:
            return f"{text} good"
        return f"{text} {'acceptable' if value >= _ACCEPTABLE else 'poor'}; {self._bottleneck()}"

    def _bottleneck(self) -> str:
        first, last = self.points[0], self.points[-1]
        if not (first.parts and last.parts):
            return "the bottleneck is not known, as the runs have no record of time by part"
        ideal = last.ranks / first.ranks if self.kind == "strong" else 1.0
        excess = {name: last.parts[name] - first.parts[name] / ideal for name in _PARTS}
        worst = max(excess, key=lambda name: excess[name])
        more = ""
        if worst == "compute" and last.parts["communication"] == 0:
            more = "; on GPUs communication is in it"
        return (
            f"the bottleneck is {_PARTS[worst]} ({1000 * first.parts[worst]:.3g} ms of a step with "
            f"{first.ranks} ranks, {1000 * last.parts[worst]:.3g} ms with {last.ranks}{more})"
        )

    def _more(self) -> list[str]:
        last, first = self.points[-1], self.points[0]
        found = []
        for times in _MORE:
            speedup, share = self.predicted(times * last.ranks / first.ranks)
            found.append(
                f"{times} times more nodes ({times * last.nodes}): speed-up {speedup:.2f}, "
                f"efficiency {100 * share:.0f}%, if the fit holds"
            )
        return found


def _comparable(accounts: Sequence[RunAccount], series: Scaling) -> list[RunAccount]:
    """Return the runs that do the same work as the first; the others are named."""
    sizes = ("train.global_batch_size", "train.batch_size_ramp")
    free = (*_FREE, *sizes) if series.kind == "weak" else _FREE
    first = accounts[0]
    own = flat(first.config)
    found = []
    for account in accounts:
        other = flat(account.config)
        keys = [
            key
            for key in sorted({*own, *other})
            if own.get(key) != other.get(key) and not key.startswith(free)
        ]
        if account.facts.record.data_digest != first.facts.record.data_digest:
            keys.append("the data set")
        if keys:
            series.left_out.append(
                f"{account.name} cannot be compared with {first.name}: {', '.join(keys)} differ"
            )
        else:
            found.append(account)
    return found


def _rate(account: RunAccount, series: Scaling) -> float | None:
    values = [v for v in account.history.series("perf/samples_per_s").finite() if v > 0]
    if len(values) < _LEAST_REPORTS or not account.spans:
        series.left_out.append(
            f"{account.name}: {len(values)} reports of its speed, and {_LEAST_REPORTS} are needed "
            "(a larger train.max_steps, or a smaller train.log_every)"
        )
        return None
    return median(values[1:])


def _point(ranks: int, group: list[tuple[RunAccount, float]]) -> _Point:
    rate = median(rate for _, rate in group)
    account = min(group, key=lambda each: abs(each[1] - rate))[0]
    steps, time = account.step, account.time
    known = steps and not time["unknown"]
    batch = float(account.value("train.global_batch_size", 1))
    batch = account.samples / steps if steps else batch  # the batches of a ramp are smaller
    return _Point(
        ranks,
        account.spans[-1].facts.nodes,
        rate,
        batch / rate,
        {name: time[name] / steps for name in _PARTS} if known else {},
    )


def _fit(series: Scaling) -> dict[str, float]:
    points = series.points
    if len(points) < 2:
        return {}
    factors = [point.ranks / points[0].ranks for point in points]
    names = ["serial", "parallel", "communication"]
    columns = [[1.0, 1 / n, math.log2(n)] for n in factors]
    if series.kind == "weak":
        names, columns = ["work", "communication"], [[row[0], row[2]] for row in columns]
    elif len(points) == 2:
        columns = [[*row[:2], 0.0] for row in columns]
    times = np.array([point.step_s for point in points])
    # Each point counts by its relative error.
    solution, _ = nnls(np.array(columns) / times[:, None], np.ones(len(times)))
    return {name: float(value) for name, value in zip(names, solution, strict=True)}


def _step_s(fit: dict[str, float], factor: float) -> float:
    constant = fit.get("serial", 0.0) + fit.get("work", 0.0)
    shared = fit.get("parallel", 0.0) / factor
    return constant + shared + fit["communication"] * math.log2(factor)
