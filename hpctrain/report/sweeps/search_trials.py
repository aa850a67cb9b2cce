"""What the trials of a search say together: how stable their order is, and what mattered."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hpctrain.report.sweeps.parameters import rank_correlation
from hpctrain.search.standing import Standing
from hpctrain.search.trials import Found

_LEAST_ORDER, _LEAST_IMPORTANCE = 6, 20  # trials; fewer say nothing
_STABLE = 0.5  # a rank correlation


def _order(found: Found) -> Iterator[str]:
    """Yield a sentence for each rung and the next one: how alike they sort the trials at both.

    It is Spearman's rank correlation. The interval is by Fisher's z, with the variance of Bonett
    and Wright (Psychometrika, 2000).
    """
    for first, second in pairwise(found.rungs):
        both = [trial for trial in found.trials if {first, second} <= trial.values.keys()]
        if (count := len(both)) < _LEAST_ORDER:
            continue
        left, right = ([found.rank(t, step)[0] for t in both] for step in (first, second))
        value = rank_correlation(left, right)
        z = math.atanh(max(-0.999, min(0.999, value)))
        half = 1.96 * math.sqrt((1 + value**2 / 2) / (count - 3))
        low, high = math.tanh(z - half), math.tanh(z + half)
        told = "too few trials to tell whether pruning was safe"
        if low > _STABLE:
            told = "the order is stable, so pruning was safe"
        elif high < _STABLE:
            told = "the order changes, so a later first rung or a smaller eta is safer"
        yield (
            f"Order of the {count} trials at step {first} and at step {second}: rank correlation "
            f"{value:.2f} (95% interval {low:.2f} to {high:.2f}); {told}."
        )


def _mattered(search: Standing) -> Iterator[str]:
    """Yield how much each parameter mattered at the last step that enough trials have reached.

    It is Optuna's PED-ANOVA (Watanabe et al., IJCAI 2023), which wants five trials among the best.
    """
    import optuna

    found = search.found
    for step in reversed(found.rungs):
        there = [t for t in found.trials if math.isfinite(t.values.get(step, math.nan))]
        if len(there) >= _LEAST_IMPORTANCE:
            study = optuna.create_study(
                direction=optuna.study.StudyDirection[found.direction.upper()]
            )
            for each in there:
                facts: dict[str, Any] = {"params": dict(each.params), "value": each.values[step]}
                study.add_trial(optuna.create_trial(distributions=search.space, **facts))
            best = min(0.5, max(0.1, 5 / len(there)))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
            parts = ", ".join(f"`{key}` {100 * share:.0f}%" for key, share in shares.items())
            yield f"What mattered for being among the best at step {step}: {parts}."
            return


def said(search: Standing) -> list[str]:
    """Return in sentences what the search has found, and whether it is to be trusted."""
    return [*search.said(), *_order(search.found), *_mattered(search)]
