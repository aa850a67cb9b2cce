"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from hpctrain.models.model import Model


class MLP(Model, nn.Sequential):
    """Fully connected layers with ReLU on the flattened input.

    Args:
        in_features: Number of elements of one sample.
        hidden: Width of each hidden layer.
        out_features: Number of outputs, for example classes.
        dropout: Probability of zeroing a hidden unit in training, 0 <= dropout < 1.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int], out_features: int, dropout: float = 0.0
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise([in_features, *hidden]):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        super().__init__(*layers, nn.Linear([in_features, *hidden][-1], out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, ...) with `in_features` elements per sample to (batch, out_features)."""
        for layer in self:
            x = layer(x)
        return x
