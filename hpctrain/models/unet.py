"""A U-Net: fields in, fields of the same grid out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.models.model import Model

_GROUPS = 8  # of a GroupNorm
_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class UNet(Model):
    """Levels of half the resolution and back, with the details of each level carried over.

        field ── stem ── level 0 ────────────────────── level 0 ── head ── field
                            └─ half ── level 1 ── double ──┘

    The shape is that of Ronneberger, Fischer and Brox 2015, "U-Net: Convolutional Networks for
    Biomedical Image Segmentation", with residual levels, and GroupNorm (Wu and He 2018), whose
    result does not depend on how a batch is divided over ranks. Grids of any size pass: a level is
    doubled to the size that it had before.

    Args:
        in_channels: Number of channels of the input.
        out_channels: Number of channels of the output.
        widths: Channels of each level; multiples of 8.
        dims: Dimensions of the grid: 1, 2 or 3.
        periodic: Whether the grid is periodic: what leaves it on one side enters on the other.

    Raises:
        ValueError: There are no widths, one is no multiple of 8, or the dimensions are others.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (32, 64, 128),
        dims: int = 2,
        periodic: bool = False,
    ) -> None:
        super().__init__()
        if dims not in _CONVOLUTIONS:
            raise ValueError(f"dims={dims}: a grid has 1, 2 or 3 dimensions")
        if not widths or any(width % _GROUPS for width in widths):
            raise ValueError(f"widths={[*widths]}: one or more multiples of {_GROUPS}")
        self.dims = dims
        shape = dims, "circular" if periodic else "zeros"
        self.stem = _convolution(in_channels, widths[0], 3, *shape)
        self.down = nn.ModuleList(
            _Level(before, width, *shape) for before, width in pairwise([widths[0], *widths])
        )
        self.up = nn.ModuleList(
            _Level(below + width, width, *shape)
            for below, width in reversed([*zip(widths[1:], widths[:-1], strict=True)])
        )
        self.head = _convolution(widths[0], out_channels, 1, *shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map fields, (batch, in_channels, *grid), to (batch, out_channels, *grid)."""
        x, kept = self.stem(x), []
        for number, level in enumerate(self.down):
            if number:
                kept.append(x)
                # A side of one point cannot be halved.
                x = _POOLS[self.dims](x, [2 if size > 1 else 1 for size in x.shape[2:]])
            x = level(x)
        for level in self.up:
            details = kept.pop()
            x = F.interpolate(x, size=details.shape[2:], mode="nearest")
            x = level(torch.cat([details, x], 1))
        out: torch.Tensor = self.head(x)
        return out


class _Level(nn.Module):
    """Two convolutions of 3 points, and the input added to their result."""

    def __init__(self, ins: int, outs: int, dims: int, padding: str) -> None:
        super().__init__()
        self.first = _convolution(ins, outs, 3, dims, padding)
        self.first_norm = nn.GroupNorm(_GROUPS, outs)
        self.second = _convolution(outs, outs, 3, dims, padding)
        self.second_norm = nn.GroupNorm(_GROUPS, outs)
        same = ins == outs
        self.shortcut = nn.Identity() if same else _convolution(ins, outs, 1, dims, padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, ins, *grid) to (batch, outs, *grid)."""
        y = F.gelu(self.first_norm(self.first(x)))
        return F.gelu(self.shortcut(x) + self.second_norm(self.second(y)))


def _convolution(ins: int, outs: int, size: int, dims: int, padding: str) -> nn.Module:
    made: nn.Module = _CONVOLUTIONS[dims](ins, outs, size, padding=size // 2, padding_mode=padding)
    return made
