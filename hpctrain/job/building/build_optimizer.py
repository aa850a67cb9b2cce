"""Builds the optimizer of the config for the parameters that this rank has."""

from __future__ import annotations

import torch

from hpctrain.config.schema import OptimizerConfig
from hpctrain.job.building.make import make
from hpctrain.parallel.wrappers.parallel_model import ParallelModel


def build_optimizer(config: OptimizerConfig, model: ParallelModel) -> torch.optim.Optimizer:
    """Return the optimizer of a model.

    Args:
        config: The section `optimizer`.
        model: The model on its ranks.

    Raises:
        ConfigError: The optimizer cannot be imported or does not take its arguments.
    """
    optimizer: torch.optim.Optimizer = make(
        "optimizer",
        {
            "_target_": config._target_,
            "lr": config.lr,  # lr_scaling multiplies the rates of all its groups
            "weight_decay": config.weight_decay,
            **config.options,
        },
        model.parameters,
    )
    return optimizer
