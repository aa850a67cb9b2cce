"""Seeds to a paper's table: mean, confidence interval, standard deviation, number of the runs.

    lr=0.1 seed=0,1,2   0.97 0.98 0.96 ──► lr=0.1   0.970 ± 0.025 (s 0.010)   n=3
    lr=0.2 seed=0,1,2   0.95 failed 0.94 ─► lr=0.2  0.945 ± 0.064 (s 0.007)   n=2, failed: …-3fa

The interval is that of Student's t distribution for the mean: t(0.975, n-1) s / sqrt(n).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from hpctrain.base.errors import ConfigError
from hpctrain.base.names.metric_names import lower_is_better
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.sweeps.parameters import cause, check_metrics

_LEVEL = 0.95


@dataclass(frozen=True)
class _Estimate:
    """What n runs say about a metric: mean (or NaN), half its 95% interval, standard deviation."""

    mean: float
    half: float | None
    deviation: float | None
    n: int

    def text(self) -> str:
        """Return `mean ± half (s deviation)`, with two digits of the interval."""
        if not self.n:
            return "-"
        if self.half is None or self.deviation is None:
            return f"{self.mean:.4g}"
        # Two digits of the interval are shown.
        digits = max(0, min(12, 1 - math.floor(math.log10(self.half)))) if self.half > 0 else 4
        shown = f"{self.mean:.{digits}f} ± {self.half:.{digits}f}"
        return f"{shown} (s {self.deviation:.{digits}f})"


def estimate(values: Sequence[float]) -> _Estimate:
    """Return mean and confidence interval of the mean of independent values."""
    count = len(values)
    if count < 2:
        return _Estimate(values[0] if values else math.nan, None, None, count)
    from scipy.special import stdtrit  # not for the report of one run

    deviation = stdev(values)
    factor = float(stdtrit(count - 1, (1 + _LEVEL) / 2))
    return _Estimate(fmean(values), factor * deviation / math.sqrt(count), deviation, count)


@dataclass(frozen=True)
class SeedGroup:
    """The runs that differ in the seed only."""

    values: dict[str, str]  # what distinguishes it from the others, by key
    runs: list[RunAccount]  # those that have finished
    missing: dict[str, str]  # with the reason
    estimates: dict[str, _Estimate]  # by metric


def settings(accounts: Sequence[RunAccount], over: str, metrics: Sequence[str]) -> list[SeedGroup]:
    """Put the runs of each setting together, the best setting first.

    `over` is the key that tells the runs of a setting apart, such as `seed`. If no run was swept
    over it, or no run has a metric, that is a ConfigError.
    """
    keys = {key for account in accounts for key in account.swept}
    found = [over] if over in keys else sorted(k for k in keys if k.rpartition(".")[2] == over)
    if len(found) != 1:
        known = ", ".join(sorted(keys)) or "none, as these runs do not differ in their configs"
        which = "is ambiguous" if found else "was not swept"
        raise ConfigError(f"--over {over}: this key {which}; the swept keys are {known}")
    groups: dict[tuple[tuple[str, str], ...], list[RunAccount]] = defaultdict(list)
    for account in accounts:
        rest = {key: value for key, value in account.swept.items() if key != found[0]}
        groups[tuple(sorted(rest.items()))].append(account)
    check_metrics(accounts, metrics)
    made = [_setting(dict(values), group, metrics) for values, group in groups.items()]
    sign = 1 if lower_is_better(metrics[0]) else -1
    first = metrics[0]

    def place(each: SeedGroup) -> tuple[bool, float]:  # those without a result come last
        return not each.runs, sign * each.estimates[first].mean if each.runs else 0.0

    return sorted(made, key=place)


def _setting(values: dict[str, str], group: list[RunAccount], metrics: Sequence[str]) -> SeedGroup:
    lacking = {each.facts.path for each in group if not all(map(each.has_result, metrics))}
    done = [each for each in group if each.facts.path not in lacking]
    missing = {each.name: cause(each) for each in group if each.facts.path in lacking}
    estimates = {m: estimate([account.final(m) for account in done]) for m in metrics}
    return SeedGroup(values, done, missing, estimates)
