"""A mixture of experts: each token passes through the few MLPs that a router chooses for it.

    x ── router ── scores ── (+ balance) ── top k ── sort by expert ── experts ──┐
    ├─────────────────────────────────────────────────── weighted sum per token ─┤
    └── shared experts, which every token passes through ───────────────────────+┘

The default is that of DeepSeek-V3 (2024): sigmoid scores, of which the chosen ones are divided by
their sum. "softmax" is Mixtral (Jiang et al. 2024). The loads of the experts are balanced without
an auxiliary loss (Wang et al. 2024): a bias of each expert takes part in the choice, but not in the
weighted sum, and each step moves it up or down by a fixed rate.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial

from hpctrain.engine.distributed.tensors import wide
from hpctrain.engine.layers.permutation import inverted, permuted


class Experts(nn.Module):
    """The MLP of a layer, made of experts of which each token uses a few.

    No token is dropped, so the result does not depend on how a batch is divided into micro-batches
    and ranks. The tokens of padded samples (mask False) count in the loads, because a model does
    not see the mask. They are few, and any number of ranks pads a batch in the same way.

    `out_std` is the standard deviation of the initial weights of `down`, `std` that of the others.
    Each step moves the bias of an expert by `balance_rate`. Every token passes through `shared`,
    too.

    Attributes:
        balance: The bias of each expert, float32 or float64 (experts,).
    """

    balance: torch.Tensor
    _loads: list[torch.Tensor]

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        per_token: int = 2,
        *,
        out_std: float,
        std: float,
        scores: str = "sigmoid",
        balance_rate: float = 1e-3,
        shared: nn.Module | None = None,
    ) -> None:
        if not 1 <= per_token <= experts:
            raise ValueError(f"experts_per_token={per_token}: it is 1 to experts={experts}")
        if scores not in ("sigmoid", "softmax"):
            raise ValueError(f"expert_scores={scores}: it is sigmoid or softmax")
        super().__init__()
        self.experts, self.per_token, self.std = experts, per_token, std
        self.scores, self.balance_rate = scores, balance_rate
        self.router = nn.Parameter(torch.empty(experts, dim))
        self.bank = Bank(dim, hidden, experts, std, out_std)
        self.shared = shared
        self.register_buffer("balance", torch.empty(experts))
        self._loads = []
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights of the router; the biases begin at 0."""
        nn.init.normal_(self.router, std=self.std)
        nn.init.zeros_(self.balance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, dim) to the same shape."""
        chosen, weights = self._route(x)
        slots = chosen.flatten()
        counts = slots.new_zeros(self.experts).scatter_add_(0, slots, torch.ones_like(slots))
        order = slots.argsort(stable=True)
        inverse = inverted(order)
        tokens = permuted(x.flatten(0, 1), order, inverse, self.per_token)
        parts = permuted(self.bank(tokens, counts), inverse, order).view(*chosen.shape, -1)
        out: torch.Tensor = (parts * weights.unsqueeze(-1).to(parts.dtype)).sum(-2)
        if self.training and out.requires_grad:
            # Activation checkpointing makes a forward pass twice; a gradient appears once.
            out.register_hook(lambda gradient: self._loads.append(counts))
        return out if self.shared is None else out + self.shared(x)

    def start_loads(self) -> None:
        """Forget the loads of a step that is made again."""
        self._loads.clear()

    def take_loads(self) -> torch.Tensor:
        """Return the loads of this rank's backward passes since the last call.

        float64 (experts,): how many tokens have chosen each expert.
        """
        loads = torch.zeros(self.experts, dtype=torch.float64, device=self.balance.device)
        for seen in self._loads:
            loads += seen
        self._loads.clear()
        return loads

    @torch.no_grad()
    def move_balance(self, loads: torch.Tensor) -> None:
        """Make the choice of experts with little load more likely, and of others less.

        `loads` are those of `take_loads`, added over all ranks.
        """
        # Whole numbers are compared, so that the sign does not depend on rounding.
        signs = (loads.sum() - loads * self.experts).sign()
        self.balance += self.balance_rate * signs.to(self.balance.dtype)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts, int64, and their weights: (batch, length, k)."""
        # The meta device, where models are counted, has no autocast.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            # Near ties flip by rounding, so the router computes in fp32 or more (as DeepSeek-V3).
            logits = F.linear(wide(x), wide(_own_part(self.router)))
        scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)
        chosen = (scores.detach() + self.balance).topk(self.per_token, -1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20)


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
        weights = [_own_part(w) for w in (self.gate, self.up, self.down)]
        kind = tokens.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            tokens, weights = tokens.to(dtype), [w.to(dtype) for w in weights]
        aligned = all(size % 8 == 0 for size in weights[0].shape[1:])  # 16 bytes, for the GPU
        fits = tokens.dtype == torch.bfloat16 and aligned and len(tokens) > 0
        if kind not in ("cpu", "meta") and fits:
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
    groups = tokens.split(_sizes(counts, len(tokens)))
    parts = zip(groups, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([(F.silu(x @ g.T) * (x @ u.T)) @ d for x, g, u, d in parts])


def _sizes(counts: torch.Tensor, tokens: int) -> list[int]:
    """Return the tokens of each expert; of tensors without values, as `plan` has them, a share.

    Those of torch.export have none either, but stand for any: there the numbers are symbols.
    """
    if counts.is_meta or (isinstance(counts, FakeTensor) and counts.fake_mode.shape_env is None):
        share, left = divmod(tokens, len(counts))
        return [share + (expert < left) for expert in range(len(counts))]
    sizes: list[int] = counts.tolist()
    return sizes


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


def _own_part(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight; of a whole one, its gradient is one of several summands.

    Ranks that have the same weight as a DTensor have other tokens.
    """
    if not isinstance(weight, DTensor):
        return weight
    summands = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=summands)
