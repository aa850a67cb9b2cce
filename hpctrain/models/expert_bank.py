"""The weights of a layer's experts, and the order of the tokens that they compute.

tokens ── permuted: sorted by expert ── Bank: each expert computes its rows ── permuted back
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial


class Bank(nn.Module):
    """The weights of all experts; expert e computes down[e](silu(gate[e](x)) * up[e](x)).

    `gate`, `up` and `down` are (experts, hidden, dim), of which expert parallel and FSDP2 divide
    the first two dimensions.
    """

    def __init__(self, dim: int, hidden: int, experts: int, std: float, out_std: float) -> None:
        super().__init__()
        self.std, self.out_std = std, out_std
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.gate, std=self.std)
        nn.init.normal_(self.up, std=self.std)
        nn.init.normal_(self.down, std=self.out_std)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply to each token its expert; (tokens, dim), sorted by expert, as is the result.

        `counts` is int64 (experts,), the tokens of each expert; with expert parallel of this
        rank's.
        """
        weights = [own_part(w) for w in (self.gate, self.up, self.down)]
        kind = tokens.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            tokens, weights = tokens.to(dtype), [w.to(dtype) for w in weights]
        aligned = all(size % 8 == 0 for size in weights[0].shape[1:])  # 16 bytes, for the GPU
        fits = tokens.dtype == torch.bfloat16 and aligned and len(tokens) > 0
        if kind != "cpu" and fits and isinstance(counts, torch.Tensor):  # or `used_evenly`'s
            return grouped(tokens, counts, *weights)
        return one_by_one(tokens, counts, *weights)


def one_by_one(
    tokens: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Apply one expert after the other; `Bank.forward` explains the arguments."""
    # All experts take part, even without tokens, so that every rank has a gradient of each weight.
    groups = tokens.split(counts.tolist())
    parts = zip(groups, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([(F.silu(x @ g.T) * (x @ u.T)) @ d for x, g, u, d in parts])


def grouped(
    tokens: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Return what `one_by_one` returns, by grouped matrix products, which do not wait for a GPU."""
    ends = counts.cumsum(0).to(torch.int32)
    inner = F.silu(F.grouped_mm(tokens, gate.mT, offs=ends))
    inner = inner * F.grouped_mm(tokens, up.mT, offs=ends)
    return F.grouped_mm(inner, down, offs=ends)


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight; of a whole one, its gradient is one of several summands.

    Ranks that have the same weight as a DTensor have other tokens.
    """
    if not isinstance(weight, DTensor):
        return weight
    summands = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=summands)
