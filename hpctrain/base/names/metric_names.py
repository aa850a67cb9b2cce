"""What the name of a metric tells: which values are better, and which is main.

    val/bits_per_byte ── a word of _LOWER ── lower values are better
    val/top1_acc      ── a word of _HIGHER ── higher ones
    val/width         ── no such word ── unknown: no config decides by it

Where an order is needed all the same, an unknown metric counts as one of which more is better.
"""

import re
from collections.abc import Container
from typing import Literal

# The main metric of a run whose own one has no value: the first of these that it has.
_USUAL = ("val/accuracy", "val/loss", "train/loss")
_LOWER = {
    *("loss", "error", "err", "mse", "rmse", "mae", "l1", "l2", "mape", "nll", "perplexity"),
    *("ppl", "bpb", "bits", "wer", "cer", "fid", "kl", "divergence", "distance", "regret"),
}
_HIGHER = {
    *("accuracy", "acc", "top1", "top5", "precision", "recall", "f1", "auc", "auroc", "ap", "map"),
    *("iou", "miou", "dice", "r2", "correlation", "bleu", "rouge", "psnr", "ssim", "reward"),
    *("score", "samples"),
}


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


def _words(name: str) -> set[str]:
    return {*re.split(r"[^a-z0-9]+", name.lower())}
