"""A small residual convolutional network for images."""

from collections.abc import Sequence

import torch
from torch import nn

from hpctrain.models.model import Model

GROUPS = 8  # groups of a GroupNorm


class ConvNet(Model):
    """Residual blocks, each of which may halve the resolution, then a mean over the pixels.

        image (batch, C, H, W) ── blocks ── (batch, widths[-1], h, w) ── mean ── head ── classes

    The blocks are those of ResNet (He et al. 2015, "Deep Residual Learning for Image Recognition",
    basic block). GroupNorm (Wu and He 2018) is the default, because its result does not depend on
    how a batch is divided over ranks and micro-batches.

    Args:
        in_channels: Number of channels of the images.
        widths: Channels of each block. Each block but the first halves height and width.
        out_features: Number of outputs, for example classes.
        norm: "group", or "batch" for BatchNorm.

    Raises:
        ValueError: There are no widths, a width does not fit the groups, or `norm` is unknown.
    """

    def __init__(
        self, in_channels: int, widths: Sequence[int], out_features: int, norm: str = "group"
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("widths=[]: a ConvNet has at least one block")
        ins = [in_channels, *widths[:-1]]
        self.blocks = nn.ModuleList(
            Block(before, width, stride=2 if i else 1, norm=norm)
            for i, (before, width) in enumerate(zip(ins, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images, a floating dtype (batch, in_channels, H, W), to (batch, out_features)."""
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions, and the input added to their result."""

    def __init__(self, ins: int, outs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(ins, outs, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(norm, outs)
        self.second = nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.second_norm = _norm(norm, outs)
        same = ins == outs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, ins, H, W) to (batch, outs, H / stride, W / stride), rounded up."""
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.shortcut(x) + self.second_norm(self.second(y)))


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind != "group":
        raise ValueError(f"norm={kind}: it is group or batch")
    if channels % GROUPS:
        raise ValueError(f"a width of {channels} is not a multiple of {GROUPS}, the groups of norm")
    return nn.GroupNorm(GROUPS, channels)
