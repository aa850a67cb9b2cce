"""The matrix products of a forward pass: their sizes, and how many positions pass through each.

A linear layer multiplies each token, a convolution each position of its output, and one of E
experts, of which a token uses k, k / E of the tokens. Blocks that the pass leaves out because they
are alike have the positions of the one that is there.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hpctrain.parallel.preparing.identical_blocks import alike


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


# The positions of a sample that pass a layer, and the elements that a convolution moves.
_Passed = dict[nn.Module, tuple[float, float]]


@contextmanager
def noted_positions(model: nn.Module, samples: int) -> Iterator[_Passed]:
    """Note what passes the layers in a call of the model with so many samples."""
    seen: _Passed = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim > 1:
            size, convolves = output.numel() / samples, isinstance(module, _ConvNd)
            moved = args[0].numel() / samples + size if convolves else 0.0
            seen[module] = size / output.shape[1 if convolves else -1], moved

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        yield seen


def matrices_of(
    model: nn.Module, seen: _Passed, otherwise: int, fp8: Collection[str]
) -> tuple[Matrix, ...]:
    """Return the weights, each once; `fp8` are the names of layers that can compute in it.

    `otherwise` are the positions of layers that were not called.
    """
    found, known = [], set()
    groups = [[model.get_submodule(name) for name in names] for names in alike(model)]
    called = {  # a layer of a block that was left out, and that of the first block
        part: first
        for first_block, *others in groups
        for block in others
        for part, first in zip(block.modules(), first_block.modules(), strict=True)
    }
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    channels_last = any(not layer.weight.is_contiguous() for layer in convolutions)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        first = module if module in seen else called.get(module, module)
        positions, moved = seen.get(first, (float(otherwise), 0.0))
        for weight in module.parameters(recurse=False):
            if weight.ndim < 2 or id(weight) in known:
                continue
            known.add(id(weight))
            rows, *others = weight.shape
            number, last, each = 1, True, positions
            if isinstance(module, _ConvNd):
                number, last = module.groups, channels_last
                rows //= number
            elif weight.ndim == 3:  # of experts
                number, rows, *others = weight.shape
                each = positions / number
            columns, in_fp8 = math.prod(others), name in fp8
            found.append(Matrix(rows, columns, each, number, in_fp8, moved, last))
    return tuple(found)
