"""A model before it is spread: layers that it cannot have, the modes of its parts, its format.

whole model in evaluation mode (transformers' from_pretrained)     all of it is set to train
a part in evaluation mode (a frozen encoder)                       it stays so, and is named

What the config says about single parameters is their learning rate, weight decay and freezing:

    optimizer.groups: [{match: '*.bias', weight_decay: 0}, {match: 'encoder.*', lr_factor: 0.1}]
    encoder.layer.bias   weight_decay 0 and lr_factor 0.1: all rules that match count
                         where two of them give the same key, the last one decides

The names are those of the whole model on one process. So the patterns mean the same in every
layout, and a pattern that matches nothing is an error although a stage of a pipeline may have none
of the parameters.
"""

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.config.rules.parameter_rules import patterns
from hpctrain.config.schema import LoRAConfig, OptimizerConfig
from hpctrain.engine.layers.lora import add_adapters, freeze_base, is_adapter
from hpctrain.engine.layers.ties import ties

log = logging.getLogger(__name__)


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose parameters or gradients cannot be divided, counted or judged.

    A ConfigError names a layer that learns its sizes from its first batch, or has sparse gradients.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        lazy = any(map(is_lazy, own))
        if lazy or (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse):
            _refuse_layer(name, type(module).__name__, lazy=lazy)


def _refuse_layer(name: str, kind: str, *, lazy: bool) -> None:
    place = f"model: the layer {name} ({kind})" if name else "model: it"
    if lazy:
        raise ConfigError(
            f"{place} learns its sizes from the first batch, but its parameters must exist before "
            "it: ranks divide them, and the optimizer gets them. Use "
            f"{kind.removeprefix('Lazy')} with its sizes"
        )
    raise ConfigError(
        f"{place} has sparse=True, and sparse gradients cannot be added over ranks, clipped and "
        "judged as the others: give sparse=False, which trains the same"
    )


def undivided(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot divide: scalars and complex ones."""
    return [p for p in model.parameters() if p.ndim == 0 or p.is_complex()]


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters, in place; buffers, such as statistics, stay.

    With float64, buffers and complex numbers are converted, too. A model that has float64 by itself
    is a ConfigError otherwise: it would be trained in another format than it was written for.
    """
    double = dtype == torch.float64
    for name, tensor in (*model.named_parameters(), *(model.named_buffers() if double else ())):
        if not double and tensor.dtype in (torch.float64, torch.complex128):
            had, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
            raise ConfigError(
                f"model: its parameter {name} is {had}, but precision.params would train it in "
                f"{wanted}: use precision=fp64, or build the model in float32 (its method float() "
                "converts it)"
            )
        if tensor.is_floating_point() or (double and tensor.is_complex()):
            tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else dtype)


def prepare_modes(model: nn.Module, *, says: bool) -> None:
    """Set a model to train, in place; parts that its constructor has set to evaluate stay so.

    With `says` rank 0 names these parts in the log.
    """
    if not model.training:
        model.train()
    parts = {name: module for name, module in model.named_modules() if not module.training}
    if parts and says and dist.get_rank() == 0:
        outermost = [name for name in parts if name.rpartition(".")[0] not in parts]
        log.info(
            "%s: in evaluation mode, as the model has made it, and it stays so: no dropout, and "
            "no new statistics of a batch norm",
            few([f"{name} ({type(parts[name]).__name__})" for name in outermost], 1),
        )


_SHOWN = 6  # names of parameters in an error
_NOTHING_LEFT = (
    "no parameter is left to be trained: optimizer.groups freezes them, train.lora trains only "
    "adapters and what train.lora.also names, or the model's own requires_grad is False"
)


@dataclass(frozen=True)
class Setting:
    """What holds for a parameter.

    `lr_factor` is its share of the schedule's learning rate, a `weight_decay` of None that of the
    config. `options` are the optimizer's keyword arguments that its group has in place of the
    others: names and values, in which lists are tuples.
    """

    lr_factor: float = 1.0
    weight_decay: float | None = None
    freeze: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def _settings(model: nn.Module, config: OptimizerConfig, blocks: list[str]) -> dict[str, Setting]:
    """Return the setting of each parameter by name; shared ones have several names."""
    shared = dict(ties(model))
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for i, rule in enumerate(config.groups):
        _check_patterns(f"optimizer.groups[{i}].match", patterns(rule), every)
    depths = {} if config.layer_decay is None else _decayed(model, config.layer_decay, blocks)
    found: dict[str, Setting] = {}
    for name, _ in model.named_parameters():
        same = [name, *shared.get(name, ())]
        made = _setting(same, config.groups, depths.get(name, 1.0))
        found |= dict.fromkeys(same, made)
    return found


def with_adapters(model: nn.Module, lora: LoRAConfig) -> nn.Module:
    """Give a whole model the adapters of `train.lora`, if there are any, and return it.

    A pattern of `train.lora.also` that fits no other parameter is a ConfigError.
    """
    if lora.patterns:
        add_adapters(model, lora.patterns, lora.rank, lora.alpha, lora.dropout)
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        _check_patterns("train.lora.also", lora.also, [n for n in every if not is_adapter(n)])
    return model


def freeze(
    model: nn.Module, optimizer: OptimizerConfig, blocks: list[str], lora: LoRAConfig
) -> dict[str, Setting]:
    """Let no gradient be computed for what is frozen; return the setting of each parameter.

    A whole model of which nothing is trained is a ConfigError.
    """
    chosen: dict[str, Setting] = {}
    if optimizer.groups or optimizer.layer_decay is not None:
        chosen = _settings(model, optimizer, blocks)
    if lora.patterns:
        freeze_base(model, lora.also)
    for name, parameter in model.named_parameters():
        if name in chosen and chosen[name].freeze:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(_NOTHING_LEFT)
    return chosen


def _setting(names: Sequence[str], rules: Sequence[dict[str, Any]], factor: float) -> Setting:
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for rule in rules:
        if any(fnmatchcase(name, pattern) for pattern in patterns(rule) for name in names):
            given |= rule
            options |= {name: _hashable(value) for name, value in rule.get("options", {}).items()}
    given |= {"options": tuple(sorted(options.items()))}
    made = Setting(**{key.name: given[key.name] for key in fields(Setting) if key.name in given})
    return replace(made, lr_factor=made.lr_factor * factor)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _decayed(model: nn.Module, decay: float, classes: list[str]) -> dict[str, float]:
    """Return each parameter's factor for layer-wise decay, as BEiT has it (Bao et al. 2022)."""
    from hpctrain.engine.parallel.preparing.blocks import find_blocks

    try:
        blocks = [name for name, _ in find_blocks(model, classes)]
    except ConfigError as error:
        raise ConfigError(f"optimizer.layer_decay={decay}: {error}") from error
    # Before the first block is layer 0; what comes after the last one has the factor 1.
    layer, last = 0, len(blocks) + 1
    factors = {}
    for name, _ in model.named_parameters():
        inside = (i for i, block in enumerate(blocks) if name.startswith(f"{block}."))
        # A parameter outside of the blocks comes before the first of them, or after one.
        layer = next(inside, -1 if layer == 0 else last - 1) + 1
        factors[name] = decay ** (last - layer)
    return factors


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that fits none of the names of parameters."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            modules = {f"{name[:i]}.*" for name in names for i, c in enumerate(name) if c == "."}
            near = difflib.get_close_matches(pattern, [*names, *sorted(modules)], 3, cutoff=0.5)
            known = f"did you mean {' or '.join(near)}?" if near else f"it has {few(names, _SHOWN)}"
            raise ConfigError(
                f"{key}={pattern}: the model has no parameter with such a name; {known}"
            )
