"""What the trials of a search say together: how stable their order is."""

import math
from collections.abc import Iterator
from itertools import pairwise

from hpctrain.report.sweeps.parameters import rank_correlation
from hpctrain.search.standing import Standing
from hpctrain.search.trials import Found

_LEAST = 6  # trials; fewer say nothing
_STABLE = 0.5  # a rank correlation


def _order(found: Found) -> Iterator[str]:
    """Yield a sentence for each rung and the next one: how alike they sort the trials at both.

    It is Spearman's rank correlation. The interval is by Fisher's z, with the variance of Bonett
    and Wright (Psychometrika, 2000).
    """
    for first, second in pairwise(found.rungs):
        both = [trial for trial in found.trials if {first, second} <= trial.values.keys()]
        if (count := len(both)) < _LEAST:
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


def said(search: Standing) -> list[str]:
    """Return in sentences what the search has found, and whether it is to be trusted."""
    return [*search.said(), *_order(search.found)]
