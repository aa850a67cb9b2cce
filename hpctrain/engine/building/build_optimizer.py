"""Builds the optimizer of the config for the parameters that this rank has."""

import inspect
from typing import Any

import torch

from hpctrain.config.rules.parameter_rules import NAMED, weight_decay_of
from hpctrain.config.schema import OptimizerConfig
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.preparing.parameter_settings import Setting
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import ConfigError


def build_optimizer(config: OptimizerConfig, model: ParallelModel) -> torch.optim.Optimizer:
    """Return the optimizer of a model."""
    optimizer: torch.optim.Optimizer = instantiate(
        "optimizer",
        {
            "_target_": config._target_,
            "lr": config.lr,  # lr_scaling multiplies the rates of all its groups
            **weight_decay_of(config),
            **config.options,
        },
        _given(config, model),
    )
    known = [key for key in optimizer.defaults if key not in ("lr", "weight_decay")]
    for i, rule in enumerate(config.groups):
        for name in rule.get("options", {}):
            if name not in known:  # the optimizer would not read it
                raise ConfigError(
                    f"optimizer.groups[{i}].options.{name}: the groups of {config._target_} have "
                    f"{', '.join(known) or 'no options'}"
                )
    for group in optimizer.param_groups:
        # torch keeps names that it was given, and then refuses to name the state by parameters.
        group.pop("param_names", None)
    return optimizer


def _given(config: OptimizerConfig, model: ParallelModel) -> list[Any]:
    """Return what the optimizer gets: the parameters, with their names, or in groups."""
    if _takes_names(config._target_):
        return [*zip(model.names, model.parameters, strict=True)]
    plain, groups = Setting(), dict[Setting, list[torch.nn.Parameter]]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        groups.setdefault(model.settings.get(name, plain), []).append(parameter)
    if not groups:  # a stage of a pipeline whose parameters are all frozen
        return [{"params": []}]
    if {*groups} == {plain}:
        return [*model.parameters]
    return [
        {
            "params": same,
            "lr": config.lr * own.lr_factor,
            "weight_decay": config.weight_decay if own.weight_decay is None else own.weight_decay,
            **dict(own.options),
        }
        for own, same in groups.items()
    ]


def _takes_names(target: str) -> bool:
    """Return whether an optimizer gets pairs of a name and a parameter."""
    called = instantiate("optimizer", {"_target_": target, "_partial_": True}).func
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # some compiled functions have no signature
        return False
    return next(iter(parameters), "") == NAMED
