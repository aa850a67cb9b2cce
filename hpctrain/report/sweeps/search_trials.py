"""What the trials of a search say together: how stable their order is, and what mattered."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hpctrain.report.sweeps.parameters import rank_correlation
from hpctrain.search.standing import Standing, values_of
from hpctrain.search.trials import Found, Trial

_LEAST_ORDER, _LEAST_IMPORTANCE = 6, 20  # trials; fewer say nothing
_STABLE = 0.5  # a rank correlation


@dataclass(frozen=True)
class Order:
    """How alike two rungs sort the trials that have reached both."""

    first: int  # the step of the earlier rung
    second: int
    trials: int
    correlation: float  # Spearman's
    low: float  # its 95% confidence interval
    high: float

    @classmethod
    def of(cls, found: Found) -> list["Order"]:
        """Return it for each rung and the next one, if enough trials have reached both.

        The interval is by Fisher's z with the variance of Bonett and Wright (Psychometrika, 2000).
        """
        orders = []
        for first, second in pairwise(found.rungs):
            both = [trial for trial in found.trials if {first, second} <= trial.values.keys()]
            if (count := len(both)) < _LEAST_ORDER:
                continue
            left, right = ([found.rank_at(t, step)[0] for t in both] for step in (first, second))
            value = rank_correlation(left, right)
            z = math.atanh(max(-0.999, min(0.999, value)))
            half = 1.96 * math.sqrt((1 + value**2 / 2) / (count - 3))
            interval = math.tanh(z - half), math.tanh(z + half)
            orders.append(cls(first, second, count, value, *interval))
        return orders

    def __str__(self) -> str:
        told = "these are too few to tell whether pruning was safe"
        if self.low > _STABLE:
            told = "the order is stable, so pruning was safe"
        elif self.high < _STABLE:
            told = "the order changes, so a later first rung or a smaller eta is safer"
        return (
            f"Order of the {self.trials} trials at step {self.first} and at step {self.second}: rank "
            f"correlation {self.correlation:.2f} (95% interval {self.low:.2f} to {self.high:.2f}); "
            f"{told}."
        )


def importance(found: Found) -> tuple[int, dict[str, float]]:
    """Return a step, and the importance of each parameter for being among the best there.

    It is Optuna's PED-ANOVA (Watanabe et al., IJCAI 2023), which wants five trials among the best.
    The step is the last one that enough trials have reached, so that all values are of one step;
    0 and nothing if there is none.
    """
    import optuna

    for step in reversed(found.rungs):
        there = [t for t in found.trials if math.isfinite(t.values.get(step, math.nan))]
        if len(there) >= _LEAST_IMPORTANCE:
            study = optuna.create_study(direction=found.direction)
            study.add_trials(
                optuna.create_trial(
                    params=dict(trial.params),
                    distributions=dict(trial.distributions),
                    value=trial.values[step],
                )
                for trial in there
            )
            best = min(0.5, max(0.1, 5 / len(there)))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
            return step, shares
    return 0, {}


def said(standing: Standing) -> list[str]:
    """Return in sentences what the search has found, and whether it is to be trusted."""
    step, shares = importance(standing.found)
    parts = [f"`{key}` {100 * share:.0f}%" for key, share in shares.items()]
    mattered = [f"What mattered for being among the best at step {step}: {', '.join(parts)}."]
    orders = map(str, Order.of(standing.found))
    return [*standing.said(), *orders, *(mattered if parts else [])]


def facts(standing: Standing) -> dict[str, Any]:
    """Return the search for --json."""
    step, shares = importance(standing.found)
    told = {"importance_at_step": step, "importance": shares}
    return standing.facts() | told | {"order": [asdict(o) for o in Order.of(standing.found)]}


def heads(found: Found) -> list[str]:
    """Return the titles of the columns of `rows`."""
    return ["trial", "run", "state", *(f"at {step}" if step else "end" for step in found.rungs), ""]


def rows(standing: Standing) -> list[list[str]]:
    """Return a row for each trial with its values at the rungs, the best of each rung first."""
    found = standing.found
    return [
        [
            str(trial.number),
            trial.run,
            standing.state(trial),
            *(_value(trial.values, step or trial.step) for step in found.rungs),
            "; ".join(filter(None, (values_of(trial), trial.reason))),
        ]
        for trial in sorted(found.trials, key=lambda each: _place(found, each))
    ]


def _place(found: Found, trial: Trial) -> tuple[int, tuple[float, int]]:
    return -trial.rung, found.rank(trial) if trial.values else (0.0, trial.number)


def _value(values: Mapping[int, float], step: int) -> str:
    return f"{values[step]:.5g}" if step in values else ""
