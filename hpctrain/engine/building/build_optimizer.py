"""Builds the optimizer of the config for the parameters that this rank has.

It is asked what it must keep to, without a step of it. An optimizer that takes a norm or a sum over
a parameter gets the one of a rank's part where ranks divide it: `DTensor.norm().item()` is that in
torch, without a word. So only those that compute each element by itself are taken there. What an
optimizer keeps in attributes, where no checkpoint finds it, is asked after the first steps
(`hpctrain.addons.looking`).
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.parameter_rules import NAMED, NEEDS_CLOSURE, weight_decay_of
from hpctrain.config.schema import OptimizerConfig
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.preparing.whole_model import Setting
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel

# By package. The steps of torch's Muon are those of DTensors, whose norms are of whole parameters.
_ELEMENTWISE = {
    "torch": {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "SGD"),
    },
    "schedulefree": {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"},
    "lion_pytorch": {"Lion"},
}
_DIVIDED = ("dp_shard", "tp", "pp", "ep")
_FUSED_ON = "cuda"  # on CPUs the bits of a run stay those that they were


def check_optimizer(target: str, optimizer: torch.optim.Optimizer, model: ParallelModel) -> None:
    """Refuse what would train another model than one process, or could not go on after a kill."""
    key, kind = f"optimizer._target_={target}", type(optimizer)
    with suppress(TypeError, ValueError):  # some compiled functions have no signature
        taken = inspect.signature(optimizer.step).parameters.values()
        if any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in taken):
            raise ConfigError(f"{key} {NEEDS_CLOSURE}")
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            raise ConfigError(
                f"{key}: its attribute {name} is an optimizer with a state of its own, which no "
                "checkpoint has: it must keep in its own state[parameter] and param_groups what a "
                "resumed run needs"
            )
    if layout := [f"{name}={size}" for name, size in model.layout.items() if name in _DIVIDED]:
        _check_elementwise(key, kind, layout)


def _check_elementwise(key: str, kind: type, layout: list[str]) -> None:
    package = kind.__module__.partition(".")[0]
    known = kind.__name__ in _ELEMENTWISE.get(package, ()) or getattr(kind, "elementwise", False)
    if not known:
        named = ", ".join(n for names in _ELEMENTWISE.values() for n in sorted(names))
        raise ConfigError(
            f"{key}: ranks divide the model ({', '.join(layout)}), and it is not known whether "
            f"{kind.__module__}.{kind.__name__} computes each element by itself. One that takes a "
            "norm or a sum over a whole parameter or the whole model would get that of a rank's "
            f"part: use parallel=ddp, or one of {named}. A class of your own that computes each "
            "element by itself says so with an attribute `elementwise = True`"
        )


def build_optimizer(config: OptimizerConfig, model: ParallelModel) -> torch.optim.Optimizer:
    """Return the optimizer of a model."""
    optimizer: torch.optim.Optimizer = instantiate(
        "optimizer",
        {
            "_target_": config._target_,
            "lr": config.lr,  # lr_scaling multiplies the rates of all its groups
            **weight_decay_of(config),
            **({"fused": True} if is_fused(config, model.parameters) else {}),
            **config.options,
        },
        _given(config, model),
    )
    if config.groups:
        _check_groups(config, [*optimizer.defaults])
    for group in optimizer.param_groups:
        # torch keeps names that it was given, and then refuses to name the state by parameters.
        group.pop("param_names", None)
    return optimizer


def is_fused(config: OptimizerConfig, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether an optimizer gets fused=True, which the config does not say.

    A step is a few kernels then. A resumed run keeps what its checkpoint has: see `OptimizerState`.
    """
    if config._target_ == "torch.optim.SGD" and any(isinstance(p, DTensor) for p in parameters):
        return False  # torch has no rule for it
    fits = (p.device.type == _FUSED_ON and p.is_floating_point() for p in parameters)
    return config.fuses and len(parameters) > 0 and all(fits)


def _check_groups(config: OptimizerConfig, known: list[str]) -> None:
    """Refuse options of groups that the optimizer would not read."""
    known = [key for key in known if key not in ("lr", "weight_decay")]
    for i, rule in enumerate(config.groups):
        for name in rule.get("options", {}):
            if name not in known:
                raise ConfigError(
                    f"optimizer.groups[{i}].options.{name}: the groups of {config._target_} have "
                    f"{', '.join(known) or 'no options'}"
                )


def _given(config: OptimizerConfig, model: ParallelModel) -> list[Any]:
    """Return what the optimizer gets: the parameters, with their names, or in groups."""
    called = instantiate("optimizer", {"_target_": config._target_, "_partial_": True}).func
    first = ""
    with suppress(TypeError, ValueError):  # some compiled functions have no signature
        first = next(iter(inspect.signature(called).parameters), "")
    if first == NAMED:
        return [*zip(model.names, model.parameters, strict=True)]
    if not model.parameters:  # a stage of a pipeline whose parameters are all frozen
        return [{"params": []}]
    return _in_groups(config, model) if model.settings else [*model.parameters]


def _in_groups(config: OptimizerConfig, model: ParallelModel) -> list[Any]:
    """Return the parameters in the groups of `optimizer.groups`, or as they are if they are one."""
    plain, groups = Setting(), dict[Setting, list[torch.nn.Parameter]]()
    for name, parameter in zip(model.names, model.parameters, strict=True):
        groups.setdefault(model.settings.get(name, plain), []).append(parameter)
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
