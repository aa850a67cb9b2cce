"""How a search stands, for `status` and `report`: its trials by rung, the best, what it has cost.

    Found (the study) ── state, rung, values ──┐
    run directories ──── state, step, hours ───┴── Standing: rows, best, saved, order
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.state import State, step
from hpctrain.runs.sweep_overrides import label
from hpctrain.search.trials import Found, Trial

HEADS = (
    *("rung", "step", "waiting", "training", "failed"),
    *("reached", "promoted", "paused", "pruned", "best"),
)
_LEAST = 4  # trials; a rank correlation of fewer says nothing


@dataclass(frozen=True)
class Order:
    """How alike two rungs sort the `trials` that have reached both."""

    first: int  # step
    second: int
    trials: int
    correlation: float  # Spearman's
    low: float  # its 95% interval
    high: float

    def __str__(self) -> str:
        told = "too few trials tell whether pruning was safe"
        if self.low > 0.5:
            told = "the order is stable, so pruning was safe"
        elif self.high < 0.5:
            told = "the order changes: a later rung or a smaller eta is safer"
        return (
            f"from step {self.first} to {self.second} the rank correlation of {self.trials} trials "
            f"is {self.correlation:.2f} (95%: {self.low:.2f} to {self.high:.2f}): {told}"
        )


@dataclass(frozen=True)
class Standing:
    """A search, with its runs and their states by name, at a time in seconds since the epoch."""

    found: Found
    runs: Mapping[str, tuple[Facts, State]]
    now: float

    def state(self, trial: Trial) -> str:
        """Return the state of a trial. Its lock may not be seen here, but the run tells it."""
        _, state = self.runs.get(trial.run, (None, State("")))
        return "training" if state.name == "running" and not trial.ended else trial.state

    def rows(self) -> list[dict[str, Any]]:
        """Return how many trials are on the way to each rung, and what became of those there."""
        found, rows = self.found, []
        for number, rung in enumerate(found.rungs, 1):
            there = [trial for trial in found.trials if trial.rung >= number]
            before = [self.state(trial) for trial in found.trials if trial.rung == number - 1]
            at_rest = [self.state(trial) for trial in there if trial.rung == number]
            best = min(there, key=lambda each: found.rank_at(each, rung), default=None)  # noqa: B023
            waiting = before.count("waiting") + before.count("promoted")
            promoted = sum(trial.goal > number for trial in there)
            row = (number, rung, waiting, before.count("training"), before.count("failed"))
            row += (len(there), promoted, at_rest.count("paused"), at_rest.count("pruned"))
            rows.append(dict(zip(HEADS, (*row, best and best.values[rung]), strict=True)))
        return rows

    @property
    def best(self) -> Trial | None:
        """The best trial that has finished; before there is one, the best of the highest rung."""
        reached = [trial for trial in self.found.trials if trial.rung]
        key = lambda each: (-each.rung, self.found.rank(each))  # noqa: E731
        return self.found.best or min(reached, key=key, default=None)

    @property
    def hours(self) -> float:
        """The device-hours of all attempts of the trials."""
        return sum(self._hours(trial) for trial in self.found.trials)

    @property
    def full_hours(self) -> float | None:
        """About the device-hours of the same trials up to the last rung; None if unknown."""
        steps = {each: step(self.runs[each][0]) for each in self.runs}
        rates = [self._hours(t) / made for t in self.found.trials if (made := steps.get(t.run))]
        last, begun = self.found.rungs[-1], sum(bool(t.run) for t in self.found.trials)
        return fmean(rates) * last * begun if rates and last else None

    def _hours(self, trial: Trial) -> float:
        if trial.run not in self.runs:
            return 0.0
        facts, state = self.runs[trial.run]
        now = self.now if state.name == "running" else None
        return (facts.trained_s(now, all_ranks=True) or 0.0) / 3600

    def orders(self) -> list[Order]:
        """Return how alike successive rungs sort the trials that have reached both."""
        found = []
        for first, second in pairwise(self.found.rungs):
            both = [t for t in self.found.trials if {first, second} <= t.values.keys()]
            if len(both) >= _LEAST:
                left = [self.found.rank_at(trial, first)[0] for trial in both]
                right = [self.found.rank_at(trial, second)[0] for trial in both]
                found.append(_order(first, second, left, right))
        return found

    def said(self) -> list[str]:
        """Return in sentences what the best is, and what the search has cost and saved."""
        found, best, full = self.found, self.best, self.full_hours
        lines = []
        if best is not None:
            so_far = "" if best.state == "finished" else " so far"
            values = label(f"{key}={value}" for key, value in best.params.items())
            lines.append(
                f"The best{so_far} is trial {best.number}, `{best.run}` ({values}): {found.metric} "
                f"is {best.value:.5g} at step {best.step}."
            )
        if self.hours:
            text = f"The trials have taken {self.hours:.3g} device-hours"
            if full:
                text += (
                    f"; to train all {len(found.trials)} up to step {found.rungs[-1]} takes about "
                    f"{full:.3g}, so pruning saves {100 * max(0.0, 1 - self.hours / full):.0f}%"
                )
            lines.append(f"{text}.")
        return lines


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Pearson's correlation; of ranks it is Spearman's. 0 if one of them does not vary."""
    a, b = fmean(left), fmean(right)
    product = sum((x - a) * (y - b) for x, y in zip(left, right, strict=True))
    spread = sum((x - a) ** 2 for x in left) * sum((y - b) ** 2 for y in right)
    return product / math.sqrt(spread) if spread else 0.0


def _order(first: int, second: int, left: Sequence[float], right: Sequence[float]) -> Order:
    """The interval is by Fisher's z, with the variance of Bonett and Wright (Psychometrika 2000)."""
    value = correlation(ranks(left), ranks(right))
    z = math.atanh(max(-0.999, min(0.999, value)))
    half = 1.96 * math.sqrt((1 + value**2 / 2) / (len(left) - 3))
    return Order(first, second, len(left), value, math.tanh(z - half), math.tanh(z + half))
