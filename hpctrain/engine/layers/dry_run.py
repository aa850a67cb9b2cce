"""What a forward pass leaves in a model, beside gradients: its buffers, modes and random numbers.

    with dry_run(model):        a library runs the model to learn shapes, operations or a graph
        learn(model)
    …                           the statistics of a batch norm are as if this had never happened

A pass that is made once more (activation checkpointing, a step that is repeated) leaves what the
first one has left: `BufferValues` keeps the values.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.data.generators import same_generators

_Named = tuple[str, nn.Module, str, torch.Tensor]  # full name, its module, the name there, value


def stored_buffers(*models: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each buffer that a checkpoint of the models has, once."""
    seen: set[int] = set()
    for name, module, key, value in _named(models):
        if key not in module._non_persistent_buffers_set and id(value) not in seen:
            seen.add(id(value))
            yield name, value


class BufferValues:
    """The values of the buffers of some models; if `stored`, only of those in a checkpoint."""

    def __init__(self, *models: nn.Module, stored: bool = False) -> None:
        self._models, self._stored = models, stored
        self._held: list[tuple[nn.Module, str, torch.Tensor]] = []
        # Torch copies a list of one dtype in one operation.
        self._of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self._kept: dict[torch.dtype, list[torch.Tensor]] = {}
        self._find()

    def keep(self) -> None:
        """Keep the present values; those that were kept before are overwritten."""
        if any(module._buffers.get(key) is not value for module, key, value in self._held):
            self._find()  # a forward pass may put another tensor in the place of a buffer
        for dtype, values in self._of_dtype.items():
            if dtype in self._kept:
                torch._foreach_copy_(self._kept[dtype], values)
            else:
                self._kept[dtype] = [value.clone() for value in values]

    def restore(self) -> None:
        """Give the models the buffers and the values of the last `keep`."""
        for module, key, value in self._held:
            module._buffers[key] = value
        for dtype, kept in self._kept.items():
            # A backward pass may need the same buffer, and refuses one whose version has changed.
            torch._foreach_copy_([value.data for value in self._of_dtype[dtype]], kept)

    def _find(self) -> None:
        self._held = [
            (module, key, value)
            for _, module, key, value in _named(self._models)
            if not self._stored or key not in module._non_persistent_buffers_set
        ]
        self._of_dtype, self._kept = {}, {}
        for value in {id(value): value for _, _, value in self._held}.values():
            expanded = 0 in value.stride() and value.numel() > 1
            if not expanded:  # one that is cannot be written
                self._of_dtype.setdefault(value.dtype, []).append(value.detach())


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Leave each module in the mode, training or evaluation, that it has before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def dry_run(*models: nn.Module) -> Iterator[None]:
    """Leave the buffers and modes of the models, and the random states, as they are before."""
    buffers = BufferValues(*models)
    buffers.keep()
    with same_modes(nn.ModuleList(models)), same_generators():
        try:
            yield
        finally:
            buffers.restore()


def _named(models: tuple[nn.Module, ...]) -> Iterator[_Named]:
    for model in models:
        for prefix, module in model.named_modules():
            for key, value in module._buffers.items():
                if value is not None:
                    yield f"{prefix}.{key}" if prefix else key, module, key, value
