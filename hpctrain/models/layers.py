"""The layers of a Transformer besides attention: linear layers, tables, MLPs and norms."""

import torch
import torch.nn.functional as F
from torch import nn

STD = 0.02  # of the initial weights, as in GPT-2


class Linear(nn.Linear):
    """A linear layer with normally distributed weights, and biases of zero."""

    def __init__(self, ins: int, outs: int, bias: bool, std: float = STD) -> None:
        self.std = std  # the constructor of nn.Linear calls reset_parameters
        super().__init__(ins, outs, bias)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors with normally distributed elements."""

    def reset_parameters(self) -> None:
        """Draw the initial vectors."""
        nn.init.normal_(self.weight, std=STD)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `std` is that of the initial `down`."""

    def __init__(self, dim: int, hidden: int, bias: bool, std: float) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias)
        self.up = Linear(dim, hidden, bias)
        self.down = Linear(hidden, dim, bias, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, dim) to the same shape."""
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class GELU(nn.Module):
    """down(gelu(up(x))); the arguments are those of `SwiGLU`."""

    def __init__(self, dim: int, hidden: int, bias: bool, std: float) -> None:
        super().__init__()
        self.up = Linear(dim, hidden, bias)
        self.down = Linear(hidden, dim, bias, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, dim) to the same shape."""
        out: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


def make_norm(kind: str, dim: int, eps: float, bias: bool) -> nn.Module:
    """Return an RMSNorm ("rms") or a LayerNorm ("layer"); only the latter can have a bias."""
    return nn.RMSNorm(dim, eps) if kind == "rms" else nn.LayerNorm(dim, eps, bias=bias)
