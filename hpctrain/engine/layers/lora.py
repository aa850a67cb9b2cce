"""LoRA: a frozen linear layer gets two small matrices that are trained (Hu et al. 2021).

    x ──┬── weight (frozen) ─────────────────────────────┐
        └── dropout ── lora_A ── lora_B ── alpha / rank ─┴── y

The layer keeps its place and its parameters their names, so plans, checkpoints and files of the
model fit as before.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.engine.distributed.tensors import wide

_ADAPTERS = ("lora_A", "lora_B")
_SHOWN = 8


def is_adapter(name: str) -> bool:
    """Return whether the name of a parameter is that of an adapter."""
    return name.rpartition(".")[2] in _ADAPTERS


class Adapted(nn.Module):
    """A linear layer with an adapter; it is mixed into the class of the layer.

    `lora_A` is (rank, inputs), `lora_B` (outputs, rank), and `lora_scale` alpha / rank.
    `lora_dropout` is the probability of zeroing an input of the adapter in training.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs)."""
        out: torch.Tensor = super().forward(x)
        if self.lora_dropout:
            x = F.dropout(x, self.lora_dropout, self.training)
        return out + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.lora_scale

    def reset_adapter(self) -> None:
        """Draw the initial values of the adapter."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def change(self) -> torch.Tensor:
        """Return what the adapter adds to the weight, in its shape, in float32 or float64."""
        change = wide(self.lora_B) @ wide(self.lora_A) * self.lora_scale
        return change.T if _is_conv1d(self) else change


def add_adapters(
    model: nn.Module, match: Sequence[str], rank: int, alpha: float, dropout: float = 0.0
) -> None:
    """Give the linear layers whose names fit a pattern an adapter, in place.

    In a pattern `*` stands for any text; one that fits no linear layer is a ConfigError. The model
    is whole, possibly on the meta device. An adapter is multiplied by alpha / rank.
    """
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    chosen: dict[str, nn.Module] = {}
    for pattern in match:
        fitting = {name: m for name, m in linear.items() if fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError(_unmatched(pattern, model, list(linear)))
        chosen |= fitting
    for module in chosen.values():
        _adapt(module, rank, alpha, dropout)
    if (initialise := getattr(model, "init_module", None)) is not None:
        setattr(model, "init_module", functools.partial(_init_module, initialise))  # noqa: B010


def freeze_base(model: nn.Module, also: Sequence[str] = ()) -> None:
    """Let no gradient be computed but for adapters and parameters whose names fit a pattern.

    The names are those of the whole model, of which this rank may have a part. Several modules may
    share a parameter, and any of its names may fit a pattern.
    """
    trained = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if is_adapter(name) or any(fnmatchcase(name, pattern) for pattern in also)
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, and of a layer with an adapter the one that it had before."""
    kind = type(module)
    return kind.__bases__[1] if isinstance(module, Adapted) else kind


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield the layers that have an adapter, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def _adapt(module: nn.Module, rank: int, alpha: float, dropout: float) -> None:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    outs, ins = weight.shape[::-1] if _is_conv1d(module) else weight.shape
    if rank > min(outs, ins):
        raise ConfigError(
            f"train.lora.rank={rank}: a matched layer has {ins} inputs and {outs} outputs; the "
            "rank is at most the smaller number"
        )
    module.__class__ = class_with_adapter(type(module))
    assert isinstance(module, Adapted)
    module.lora_scale, module.lora_dropout = alpha / rank, dropout
    module.lora_A = nn.Parameter(weight.new_empty(rank, ins))
    module.lora_B = nn.Parameter(weight.new_empty(outs, rank))
    module.reset_adapter()


_CLASSES: dict[type[nn.Module], type[Adapted]] = {}


def class_with_adapter(kind: type[nn.Module]) -> type[Adapted]:
    """Return the class of a layer of this class that has an adapter."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Adapted{kind.__name__}", (Adapted, kind), {})
    return _CLASSES[kind]


def _init_module(initialise: Callable[[nn.Module], Any], module: nn.Module) -> None:
    """Initialise what a module itself holds; the weights are drawn as without the adapter."""
    initialise(module)
    if isinstance(module, Adapted):
        module.reset_adapter()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is the linear layer of Hugging Face's GPT-2, whose weight is transposed."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def _unmatched(pattern: str, model: nn.Module, linear: Sequence[str]) -> str:
    others = [n for n, _ in model.named_modules() if n and fnmatchcase(n, pattern)]
    why = "no module has such a name"
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        why = f"{others[0]} is a {kind}, and adapters belong to linear layers"
    ends = sorted({f"*.{name.rpartition('.')[2]}" for name in linear})
    return (
        f"train.lora.match={pattern}: {why}; linear layers are "
        f"{', '.join(ends[:_SHOWN]) or '(none)'}"
    )
