"""What the name of a metric tells: which values are better, how large they can be, which is main.

    val/bits_per_byte ── a word of _LOWER ── lower values are better
    val/top1_acc      ── a word of _HIGHER, and of _SHARES ── higher ones, at most 1 or 100
    val/width         ── no such word ── unknown: no config decides by it

Where an order is needed all the same, an unknown metric counts as one of which more is better.
"""

import math
import re
from collections.abc import Container
from typing import Literal

# The main metric of a run whose own one has no value: the first of these that it has.
_USUAL = ("val/accuracy", "val/loss", "train/loss")
_LOWER = {
    *("loss", "error", "err", "mse", "rmse", "mae", "l1", "l2", "mape", "nll", "perplexity"),
    *("ppl", "bpb", "bits", "wer", "cer", "fid", "kl", "divergence", "distance", "regret"),
}
_RATES = {
    *("accuracy", "acc", "top1", "top5", "precision", "recall", "f1", "auc", "auroc", "ap", "map"),
}
_HIGHER = {
    *_RATES,
    *("iou", "miou", "dice", "r2", "correlation", "bleu", "rouge", "psnr", "ssim", "reward"),
    *("score", "samples"),
}
# Of these a value is a share: from 0 to 1, or to 100 for a task that counts in percent.
_SHARES = {*_RATES, "iou", "miou", "dice", "fraction", "percent", "percentage"}


def main_metric(wanted: str, known: Container[str]) -> str:
    """Return the metric that stands for a run: the one of its config, or a usual one; "": none."""
    return next((name for name in (wanted, *_USUAL) if name in known), "")


def better(metric: str) -> Literal["lower", "higher"] | None:
    """Return which values of a metric are better; None if its name does not tell.

    >>> better("val/bits_per_byte"), better("val/top1_acc"), better("val/width")
    ('lower', 'higher', None)
    """
    words = _words(metric.partition("/")[2])
    if words & _LOWER:
        return "lower"
    return "higher" if words & _HIGHER else None


def lower_is_better(metric: str) -> bool:
    """Return it by the name of the metric; one that does not tell counts as higher."""
    return better(metric) == "lower"


def most(metric: str, seen: float) -> float:
    """Return the largest value that a metric can have, by its name and the largest that was seen.

    >>> most("val/accuracy", 0.98), most("val/top1_acc", 97.1), most("val/loss", 0.2)
    (1.0, 100.0, inf)
    """
    words = _words(metric.rpartition("/")[2])
    if not words & _SHARES or seen > 100:
        return math.inf
    return 1.0 if seen <= 1 and not words & {"percent", "percentage"} else 100.0


def _words(name: str) -> set[str]:
    return {*re.split(r"[^a-z0-9]+", name.lower())}
