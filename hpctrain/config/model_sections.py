"""What a config says of a model and of the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema import (
    CheckpointConfig,
    Config,
    LoRAConfig,
    OptimizerConfig,
    PrecisionConfig,
)


@dataclass(frozen=True)
class ModelSections:
    """How a model is built, and where the weights are that its adapters belong to."""

    model: Mapping[str, Any]
    precision: PrecisionConfig
    seed: int  # what its constructor draws follows from it
    optimizer: OptimizerConfig  # its groups say which parameters are frozen
    blocks: list[str]  # `parallel.blocks`
    lora: LoRAConfig
    start: CheckpointConfig
    output_dir: str  # a run that `checkpoint.init_from` names is in it

    @classmethod
    def of(cls, config: Config) -> ModelSections:
        """Return these sections of a config."""
        return cls(
            *(config.model, config.precision, config.seed, config.optimizer),
            *(config.parallel.blocks, config.train.lora, config.checkpoint, config.output_dir),
        )
