"""Scaling: how much faster more ranks are, and what holds them back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hpctrain.base.files.yaml_file import flat
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.compare_tree import differing
from hpctrain.insight.report.tree import Fact

_GOOD, _ACCEPTABLE = 0.95, 0.81
_LEAST_REPORTS = 3  # the first one has the warm-up
# Keys that a series may change, and those that say where and how a run is kept.
_FREE = (
    *("launch.", "parallel.", "network.", "site.", "tracking.", "checkpoint.", "monitor."),
    *("name", "output_dir", "train.accumulate", "train.micro_batch_size"),
)
# Of the time of a step, with the titles of their columns.
_PARTS = {"compute": "compute", "communication": "communication", "data_wait": "wait for data"}


@dataclass(frozen=True)
class _Point:
    """The runs with one number of ranks: median samples per second, seconds by part of a step."""

    ranks: int
    nodes: int
    rate: float
    parts: list[float]


@dataclass
class Scaling:
    """A scaling series."""

    kind: str  # `strong` or `weak`
    points: list[_Point] = field(default_factory=list)  # by ranks
    left_out: list[str] = field(default_factory=list)  # runs that are not in it, and why

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
        return series

    def speedup(self, point: _Point) -> float:
        """Return how many times more samples per second than the smallest run."""
        return point.rate / self.points[0].rate

    def efficiency(self, point: _Point) -> float:
        """Return the speed-up divided by the factor of the ranks."""
        return self.speedup(point) / (point.ranks / self.points[0].ranks)

    def rows(self) -> list[list[Fact]]:
        """Return a row for each number of ranks; the seconds of a step by part say what holds."""
        return [
            [
                Fact("ranks", point.ranks, "ranks", str(point.ranks)),
                Fact("nodes", point.nodes, "nodes", str(point.nodes)),
                Fact("samples_per_s", point.rate, "samples/s", f"{point.rate:,.0f}"),
                Fact("speedup", self.speedup(point), "speed-up", f"{self.speedup(point):.2f}"),
                Fact("", None, "ideal", f"{point.ranks / self.points[0].ranks:g}"),
                Fact("efficiency", share := self.efficiency(point), "efficiency", _judged(share)),
                *(
                    Fact(name, value, title, f"{1000 * value:.3g} ms")
                    for (name, title), value in zip(_PARTS.items(), point.parts, strict=True)
                ),
            ]
            for point in self.points
        ]


def _judged(share: float) -> str:
    word = "good" if share >= _GOOD else "acceptable" if share >= _ACCEPTABLE else "poor"
    return f"{100 * share:.0f}%, {word}"


def _comparable(accounts: Sequence[RunAccount], series: Scaling) -> list[RunAccount]:
    """Return the runs that do the same work as the first; the others are named."""
    sizes = ("train.global_batch_size", "train.batch_size_ramp")
    free = (*_FREE, *sizes) if series.kind == "weak" else _FREE
    first = accounts[0]
    own = flat(first.config)
    found = []
    for account in accounts:
        keys = [key for key in differing(own, flat(account.config)) if not key.startswith(free)]
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
    parts = [time[name] / steps if known else math.nan for name in _PARTS]
    return _Point(ranks, account.spans[-1].facts.nodes, rate, parts)
