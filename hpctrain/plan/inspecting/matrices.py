"""The matrix products of a forward pass: their sizes, and how many positions pass through each.

A linear layer multiplies each token, a convolution each position of its output, and one of E
experts, of which a token uses k, k / E of the tokens. Blocks that the pass leaves out because they
are alike have the positions of the one that is there.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd


@dataclass(frozen=True)
class Matrix:
    """A weight, or several of one size, each with its own positions."""

    rows: int
    columns: int
    positions: float  # of a sample, which are multiplied by it
    number: int = 1  # of equal weights: the experts of a layer, the groups of a convolution
    fp8: bool = False  # whether precision.compute=fp8 computes it so
    moved: float = 0.0  # elements of a sample that a convolution reads and writes; 0 for others
    channels_last: bool = True  # otherwise cuDNN turns them around for products in 16 bits

    @property
    def flops(self) -> float:
        """The operations of the forward pass of a sample."""
        return 2.0 * self.rows * self.columns * self.positions * self.number


class Positions:
    """Notes the positions of the layers while it is entered, and the model is called."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self._model, self._samples = model, samples
        self._seen: dict[tuple[Any, ...], float] = {}
        self._moved: dict[tuple[Any, ...], float] = {}

    def __enter__(self) -> Positions:
        self._handles = [m.register_forward_hook(self._note) for m in self._model.modules()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim > 1:
            channels = output.shape[1 if isinstance(module, _ConvNd) else -1]
            self._seen[_kind(module)] = output.numel() / channels / self._samples
            if isinstance(module, _ConvNd):
                self._moved[_kind(module)] = (args[0].numel() + output.numel()) / self._samples

    def matrices(self, otherwise: int, fp8: Collection[str]) -> tuple[Matrix, ...]:
        """Return the weights, each once; `fp8` are the names of layers that can compute in it.

        `otherwise` are the positions of layers that were not called.
        """
        found, known = [], set()
        convolutions = [m for m in self._model.modules() if isinstance(m, _ConvNd)]
        channels_last = any(not layer.weight.is_contiguous() for layer in convolutions)
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            positions = self._seen.get(_kind(module), float(otherwise))
            for weight in module.parameters(recurse=False):
                if weight.ndim < 2 or id(weight) in known:
                    continue
                known.add(id(weight))
                fields: dict[str, Any] = {"fp8": name in fp8}
                number, each, shape = 1, positions, weight.shape
                if isinstance(module, _ConvNd):
                    number = module.groups
                    shape = torch.Size((shape[0] // number, *shape[1:]))
                    fields["moved"] = self._moved.get(_kind(module), 0.0)
                    fields["channels_last"] = channels_last
                elif weight.ndim == 3:
                    number, shape = weight.shape[0], weight.shape[1:]
                    each = positions / number
                sizes = int(shape[0]), math.prod(shape[1:])
                found.append(Matrix(*sizes, each, number, **fields))
        return tuple(found)


def _kind(module: nn.Module) -> tuple[Any, ...]:
    shapes = (tuple(p.shape) for p in module.parameters(recurse=False))
    return type(module), getattr(module, "stride", None), *shapes
