"""The runs of a sweep: which are best by its metric, and why others have no result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import ConfigError
from hpctrain.base.names.metric_names import lower_is_better
from hpctrain.base.terminal.console import shortened
from hpctrain.base.units import duration
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.runs import sweep_overrides

_LONGEST = 120  # characters of a cause


@dataclass(frozen=True)
class SweptRuns:
    """Runs that were made with the same config but for some values."""

    metric: str  # by which they are compared
    finished: list[RunAccount]  # with a finite value of it, best first
    others: list[RunAccount]  # failed, not begun, in progress, not finite
    keys: list[str]  # whose values differ

    @classmethod
    def of(cls, accounts: Sequence[RunAccount], metric: str | None = None) -> SweptRuns:
        """Sort the runs by a metric; None takes the main metric of the most runs."""
        names = [account.metric for account in accounts]
        metric = metric or max(names, key=names.count)
        good, bad = list[RunAccount](), list[RunAccount]()
        for account in accounts:
            (good if account.has_result(metric) else bad).append(account)
        sign = 1 if lower_is_better(metric) else -1
        good.sort(key=lambda account: sign * account.final(metric))
        found: dict[str, set[str]] = defaultdict(set)
        for account in accounts:
            for key, value in account.swept.items():
                found[key].add(value)
        return cls(metric, good, bad, [key for key, values in found.items() if len(values) > 1])

    def cells(self, account: RunAccount) -> list[str]:
        """Return the row of a run: its name, metric, swept values, time and goodput."""
        share = account.goodput
        return [
            account.name,
            f"{account.final(self.metric):.5g}",
            *(account.swept.get(key, "") for key in self.keys),
            duration(account.time["allocated"]),
            "" if share is None else f"{100 * share:.0f}%",
        ]

    def answer(self) -> list[str]:
        """Return in sentences which run is best."""
        if not self.finished:
            return [f"No run has a value of {self.metric}."]
        best = self.finished[0]
        values = label({key: value for key, value in best.swept.items() if value})
        lines = [
            f"The best of {len(self.finished) + len(self.others)} runs is `{best.name}`"
            + (f" ({values})" if values else "")
            + f": {self.metric} is {best.final(self.metric):.5g}."
        ]
        if count := len(self.others):
            lines.append("1 run has no result." if count == 1 else f"{count} runs have no result.")
        return lines


def label(values: Mapping[str, str]) -> str:
    """Return values as a short text, as `status` and MLflow show them: `lr=0.001 seed=0`."""
    return sweep_overrides.label(f"{key}={value}" for key, value in values.items())


def check_metrics(accounts: Sequence[RunAccount], metrics: Sequence[str]) -> None:
    """Raise a ConfigError if no run has a finite value of one of the metrics."""
    for metric in metrics:
        if not any(math.isfinite(account.final(metric)) for account in accounts):
            names = sorted({name for account in accounts for name in account.history.metrics})
            raise ConfigError(
                f"--metric {metric}: no run has a value of it; they have {', '.join(names)}"
            )


def cause(account: RunAccount) -> str:
    """Return in one short line why a run has no result; `logs` and --json have all of it."""
    if account.state.name == "finished":
        return "its metric is not there or not finite"
    text = " ".join((account.state.reason or account.facts.attempt.error).split())
    return f"{account.state.name}: {shortened(text, _LONGEST)}" if text else account.state.name
