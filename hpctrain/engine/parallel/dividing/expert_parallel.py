"""Expert parallel: the ranks of a group divide the experts of each layer, and exchange tokens.

    tokens sorted by expert ── all-to-all ── sorted by own expert ── experts ──┐
    one sum per token ──────── all-to-all ── in the order of arrival ──────────┘

The ranks of a group are data-parallel ranks (GShard, Lepikhin et al. 2021), so they have different
tokens. The gradient of an expert is the sum over the group before anything is reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.degrees import nearest
from hpctrain.engine.layers.permutation import inverted, permuted
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.parallel.dividing.chosen_plan import matching
from hpctrain.engine.parallel.mesh import Mesh

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divide_experts(
    model: nn.Module, plan: Plan, mesh: Mesh, ep: int
) -> list[tuple[nn.Module, DeviceMesh]]:
    """Divide the experts over groups of `ep` ranks, in place; all ranks call this together.

    The model, or a stage of it, is on the meta device or equal on all ranks. Returns the modules
    that hold the experts, and the ranks that have the same ones.
    """
    if ep == 1:
        return []
    group, others = mesh.experts(ep)
    divided = []
    ranks = others.size(others.ndim - 1) if mesh.degrees.dp_shard > 1 else 1
    for name, module in matching(model, plan.experts):
        for key, parameter in list(module.named_parameters(recurse=False)):
            rows, width = parameter.shape[0] // ep, parameter.shape[1]
            if rows % ranks and width % ranks:
                raise ConfigError(
                    f"parallel.ep={ep} leaves {rows} experts of {name} for {ranks} ranks, which "
                    f"divide neither these nor their width {width}: use a width of "
                    f"{' or '.join(map(str, nearest(width, ranks)))}"
                )
            part = distribute_tensor(parameter.data, group, [Shard(0)], src_data_rank=None)
            setattr(module, key, nn.Parameter(part, parameter.requires_grad))
        module.forward = partial(_exchanged, module.forward, group.get_group())
        divided.append((module, others))
    return divided


def _exchanged(
    compute: Compute, group: dist.ProcessGroup, tokens: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return `compute(tokens, counts)`, computed by the ranks that have the experts."""
    ranks = group.size()
    arriving = torch.empty_like(counts)  # (ranks * own experts,), by rank that sends
    dist.all_to_all_single(arriving, counts, group=group)
    by_rank = torch.stack([counts, arriving]).view(2, ranks, -1)
    sent, received = by_rank.sum(-1).tolist()
    tokens = _exchange(tokens, received, sent, group, ranks)
    # What arrives is sorted by rank, then by expert.
    own = by_rank[1].shape[1]
    experts = torch.arange(own, device=counts.device).repeat(ranks)
    order = experts.repeat_interleave(arriving, output_size=len(tokens)).argsort(stable=True)
    inverse = inverted(order)
    out = compute(permuted(tokens, order, inverse), by_rank[1].sum(0))
    return _exchange(permuted(out, inverse, order), sent, received, group, 1 / ranks)


def _exchange(*args: Any) -> torch.Tensor:
    out: torch.Tensor = _Exchange.apply(*args)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose gradient goes the way back and is multiplied by a factor.

    Gradients of experts are sums over the group, and means over the ranks with the same experts;
    others are means over all ranks. So the size of the group divides it, and multiplies it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup,
        factor: float,
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group, ctx.factor = received, sent, group, factor
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back * ctx.factor, None, None, None, None
