"""The training that a plan is about: what of it decides its memory, its time and its layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from hpctrain.config.schema import (
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class PlannedTraining:
    """The sections of a training that decide a plan; a layout differs in the last three."""

    model: dict[str, Any]
    task: dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    train: TrainConfig
    parallel: ParallelConfig
    launch: LaunchConfig
    counts_gpus: bool  # launch.gpus_per_node goes with the ranks of a node
    # Raises the ConfigError of a training with these sections on so many ranks.
    check: Callable[[Self, int], None]
