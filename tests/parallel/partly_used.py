"""Models of which ranks use different parameters, given by `_target_`-like names."""

from typing import Any

import torch
from torch import nn


class Heads(nn.Module):
    """Blocks, and two heads, each for the rows of one kind."""

    def __init__(self, sizes: tuple[int, int] = (5, 5), unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, size) for size in sizes)
        self.scale = nn.Parameter(torch.ones(4)) if unused else None

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out = torch.zeros(len(x))
        for number, head in enumerate(self.heads):
            rows = kind == number
            if rows.any():
                out = out.index_add(0, rows.nonzero()[:, 0], head(x[rows]).pow(2).mean(1))
        return out


class Skipping(nn.Module):
    """Blocks, each for rows of some kinds: a rank without such rows skips the block."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.calls = calls

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(self.calls):
            for number, layer in enumerate(self.layers):
                rows = kind != number
                if rows.any():
                    x = x.index_add(0, rows.nonzero()[:, 0], torch.tanh(layer(x[rows])))
        return self.head(x).pow(2).mean(1)


class RowLosses:
    """The mean over the rows of what the model returns."""

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        losses = model(batch["x"], batch["kind"])
        return {"loss": ((losses * batch["mask"]).sum(), batch["mask"].sum())}


class Odd(nn.Module):
    """Blocks of which two share a parameter, a scalar and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.phase = nn.Parameter(torch.complex(torch.ones(5), torch.full((5,), 0.3)))

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.fft.irfft(torch.fft.rfft(x) * self.phase, n=8)
        return (x * self.scale).pow(2).mean(1)


class Ordered(nn.Module):
    """It calls its blocks in the order that the first row of `kind` names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        for number in ORDERS[int(kind[0])]:
            x = x + torch.tanh(self.layers[number](x))
        return self.head(x).pow(2).mean(1)


# The order of each kind: all blocks; one of them twice; another order.
ORDERS = {9: (0, 1, 2), 8: (0, 1, 0, 2), 7: (2, 0, 1), 6: (0, 2)}
