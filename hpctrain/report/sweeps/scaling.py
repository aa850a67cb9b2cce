"""Scaling: how much faster more ranks are, and what holds them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hpctrain.report.account.run_account import RunAccount
from hpctrain.runs.sweep_overrides import flat

_GOOD, _ACCEPTABLE = 0.95, 0.81
_LEAST_REPORTS = 3  # the first one has the warm-up
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
    """The runs with one number of ranks: median samples per second, seconds by part of a step."""

    ranks: int
    nodes: int
    rate: float
    parts: dict[str, float]


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

    def lines(self) -> list[str]:
        """Return what the series says: table and verdict."""
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
        return [*found, self.verdict, *self.left_out]

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
    return _Point(
        ranks,
        account.spans[-1].facts.nodes,
        rate,
        {name: time[name] / steps for name in _PARTS} if known else {},
    )
