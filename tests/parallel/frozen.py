"""Models of which a part is not trained, for the parity matrix."""

import torch
from torch import nn

from hpctrain.engine.layers.plan import Plan


class Layer(nn.Module):
    """A linear layer, and a nonlinearity unless it is the head."""

    def __init__(self, inputs: int, outputs: int, head: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if self.head else torch.tanh(x)


class Tower(nn.Module):
    """An input layer, four blocks, and a head: the last of the blocks, or a module of its own.

    Args:
        outside: Whether the head is outside of the blocks.
        encoder: The input layer and so many blocks are computed under `no_grad`, if it is not 0.
    """

    def __init__(self, outside: bool, encoder: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 24)
        ends = [24] * 4 if outside else [24, 24, 24, 10]
        self.layers = nn.ModuleList(
            Layer(24, end, head=not outside and i == 3) for i, end in enumerate(ends)
        )
        self.head = nn.Linear(24, 10) if outside else None
        self.encoder = encoder

    @property
    def plan(self) -> Plan:
        """How the model may be divided."""
        styles = {f"layers.{i}.linear": ("colwise", "rowwise")[i % 2] for i in range(4)}
        return Plan(
            tensor=styles,
            first=("embed",),
            blocks="layers",
            last=("head",) if self.head is not None else (),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder):
            x = self.embed(x.flatten(1))
        for i, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= self.encoder):
                x = layer(x)
        return x if self.head is None else self.head(x)
