"""The keys of `evaluation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


@dataclass
class EvaluationConfig:
    """Where the model is evaluated: by the training itself, or by jobs of their own."""

    job: bool = key(
        False,
        "Each checkpoint is evaluated by a Slurm job of its own, which the run submits, and the "
        "training itself makes no evaluation. The results have the steps of the checkpoints.",
    )
    overrides: dict[str, Any] = key(
        {},
        "Keys that such a job has otherwise than the training, {KEY: VALUE, ...}: its resources, "
        "such as launch.nodes: 1 or site.partition: short, and its layout, such as parallel.tp: 1.",
    )
    most_waiting: int = key(
        4,
        "So many checkpoints at most wait for their evaluation. Until then they are kept, and "
        "further ones are left out; the last one of the run is always evaluated.",
        count="checkpoints",
    )
