"""Models of which ranks use different parameters, given by `_target_`-like names."""

from dataclasses import dataclass
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

    def __init__(self, calls: int = 1, encoder: int = 0, thaws: int = 99) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        # So many blocks are computed under `no_grad`, until so many forward passes are over.
        self.calls, self.encoder, self.thaws = calls, encoder, thaws

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        first = self.encoder if self.thaws > 0 else 0
        self.thaws -= 1
        with torch.set_grad_enabled(first == 0):
            x = self.embed(x)
        for _ in range(self.calls):
            for number, layer in enumerate(self.layers):
                rows = kind != number
                with torch.set_grad_enabled(number >= first):
                    if rows.any():
                        x = x.index_add(0, rows.nonzero()[:, 0], torch.tanh(layer(x[rows])))
        return self.head(x).pow(2).mean(1)


class RowLosses:
    """The mean over the rows of what the model returns."""

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        losses = model(batch["x"], batch["kind"])
        if isinstance(losses, dict):  # hidden states, too
            losses = losses["rows"] + sum(hidden.mean(1) for hidden in losses["hidden"])
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


@dataclass
class State:
    """What a block of `Tuned` may take and return."""

    x: torch.Tensor


class Tuned(nn.Module):
    """Blocks of which the first are frozen, and the last returns what the model returns.

    Args:
        how: In what the values go into the blocks, and come out of them.
        frozen: So many blocks are frozen.
    """

    def __init__(self, how: str, frozen: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TunedLayer(how) for _ in range(3))
        self.layers[:frozen].requires_grad_(False)
        self.how = how

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> Any:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            if "changed" in self.how:
                x += 0.5
            hidden.append(x)
        if self.how == "twice":
            return self.layers[-1](x)[:, 0]
        if self.how == "detached":
            return x[:, 0] + self.layers[-1](x).detach()[:, 1]
        if self.how == "hidden":
            return {"rows": hidden[-1][:, 0], "hidden": hidden}
        if self.how == "in a dict":
            return x["x"][:, 0]
        if self.how == "in a tuple":
            return x[0][:, 0] * x[1]
        if self.how == "in a dataclass":
            return x.x[:, 0]
        return x if x.ndim == 1 else x[:, 0]


class TunedLayer(nn.Linear):
    """A block of `Tuned`."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how

    def forward(self, x: Any) -> Any:
        if self.how == "in a dict":
            return {"x": torch.sin(super().forward(x["x"] if isinstance(x, dict) else x))}
        if self.how == "in a tuple":
            x = torch.sin(super().forward(x[0] if isinstance(x, tuple) else x))
            return x, x.detach().abs().mean(1)
        if self.how == "in a dataclass":
            return State(torch.sin(super().forward(x.x if isinstance(x, State) else x)))
        x = torch.sin(super().forward(x))
        return x.unflatten(0, (1, -1))[0] if self.how.startswith("a view") else x
