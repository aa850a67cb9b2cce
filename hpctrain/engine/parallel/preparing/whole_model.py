"""A model before it is spread: layers that it cannot have, the modes of its parts, its format.

whole model in evaluation mode (transformers' from_pretrained)     all of it is set to train
a part in evaluation mode (a frozen encoder)                       it stays so, and is named
"""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.base.terminal.terminal import few
from hpctrain.engine.distributed.tensors import dtype_name
from hpctrain.engine.parallel.preparing.blocks import path_of
from hpctrain.errors import ConfigError

log = logging.getLogger(__name__)


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose parameters or gradients cannot be divided, counted or judged.

    A ConfigError names a layer that learns its sizes from its first batch, or has sparse gradients.
    """
    for name, module in model.named_modules():
        place = f"model: the layer {name} ({type(module).__name__})" if name else "model: it"
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            plain = type(module).__name__.removeprefix("Lazy")
            raise ConfigError(
                f"{place} learns its sizes from the first batch, but its parameters must exist "
                "before it: ranks divide them, and the optimizer gets them. Use "
                f"{plain} with its sizes"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{place} has sparse=True, and sparse gradients cannot be added over ranks, "
                "clipped and judged as the others: give sparse=False, which trains the same"
            )


def undivided(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot divide: scalars and complex ones."""
    return [p for p in model.parameters() if p.ndim == 0 or p.is_complex()]


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters, in place; buffers, such as statistics, stay.

    With float64, buffers and complex numbers are converted, too. A model that has float64 by itself
    is a ConfigError otherwise: it would be trained in another format than it was written for.
    """
    if dtype == torch.float64:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else dtype)
        return
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float64, torch.complex128):
            raise ConfigError(
                f"model: its parameter {name} is {dtype_name(parameter.dtype)}, but "
                f"precision.params would train it in {dtype_name(dtype)}: use precision=fp64, or "
                "build the model in float32 (its method float() converts it)"
            )
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def prepare_modes(model: nn.Module, *, says: bool) -> None:
    """Set a model to train, in place; parts that its constructor has set to evaluate stay so.

    With `says` rank 0 names these parts in the log.
    """
    if not model.training:
        model.train()
    parts = list(_evaluating("", model))
    if parts and says and dist.get_rank() == 0:
        log.info(
            "%s: in evaluation mode, as the model has made it, and it stays so: no dropout, and "
            "no new statistics of a batch norm",
            few(parts, 1),
        )


def _evaluating(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost parts in evaluation mode."""
    if not module.training:
        yield f"{name} ({type(module).__name__})"
        return
    for key, child in module.named_children():
        yield from _evaluating(path_of(name, key), child)
