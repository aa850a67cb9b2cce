"""The keys of `train.compression` and `train.local_sgd`: what DDP replicas send each other."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


def _check_ratio(ratio: float | None) -> str:
    return "" if ratio is None or 0 < ratio <= 1 else "it must be greater than 0 and at most 1"


@dataclass
class CompressionConfig:
    """Gradients are compressed before DDP sends them; with one rank it has no effect."""

    kind: str = key(
        "none",
        "powersgd sends matrices of a low rank, topk the largest elements, int8 integers of 8 "
        "bits, onebit the signs. All but int8 add to the next gradient what they did not send.",
        choices=("none", "powersgd", "topk", "int8", "onebit"),
    )
    start_step: int = key(
        0, "Until this many steps are made, gradients are sent whole.", unit="steps", at_least=0
    )
    rank: int = key(4, "powersgd sends two matrices of this rank for each.", at_least=1)
    ratio: float = key(
        0.01, "topk sends this part of the elements of each parameter.", check=_check_ratio
    )
    final_ratio: float | None = key(
        None,
        "The ratio of topk changes from ratio to final_ratio, by the same factor in each step. "
        "Null keeps ratio.",
        check=_check_ratio,
    )
    ratio_steps: int = key(
        1000, "final_ratio is reached this many steps after start_step.", count="steps"
    )


@dataclass
class LocalSGDConfig:
    """DDP replicas train by themselves and are averaged now and then, for slow connections.

    With one rank it has no effect.
    """

    every: int | None = key(
        None,
        "The parameters of the replicas are averaged after this many steps, and after the last "
        "step of the run. Until then, evaluations and clipping see each rank's own replica. Null "
        "reduces the gradients of each step.",
        count="steps",
    )
    start_step: int = key(
        0,
        "Until this many steps are made, the gradients of each step are reduced (post-local SGD).",
        unit="steps",
        at_least=0,
    )
    outer_lr: float = key(
        1.0,
        "The common parameters move by this factor times the mean change of the replicas. 1 "
        "without momentum averages the replicas; DiLoCo takes 0.7.",
        above=0,
    )
    outer_momentum: float = key(
        0.0, "The Nesterov momentum of the mean changes. DiLoCo takes 0.9.", between=(0, 1)
    )
