"""The keys of `train.compression` and `train.local_sgd`: what DDP replicas send each other."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class CompressionConfig:
    """Gradients are compressed before DDP sends them; with one rank it has no effect."""

    kind: str = key(
        "none",
        "powersgd sends matrices of a low rank, topk the largest elements, int8 integers of 8 "
        "bits. The first two add to the next gradient what they did not send.",
        choices=("none", "powersgd", "topk", "int8"),
    )
    rank: int = key(4, "powersgd sends two matrices of this rank for each.", at_least=1)
    ratio: float = key(
        0.01, "topk sends this part of the elements of each parameter.", above=0, at_most=1
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
    outer_lr: float = key(
        1.0,
        "The common parameters move by this factor times the mean change of the replicas. 1 "
        "without momentum averages the replicas; DiLoCo takes 0.7.",
        above=0,
    )
    outer_momentum: float = key(
        0.0, "The Nesterov momentum of the mean changes. DiLoCo takes 0.9.", at_least=0, at_most=1
    )
