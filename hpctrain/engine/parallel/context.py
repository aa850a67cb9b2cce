"""Context parallel: the ranks of a group divide every sequence.

    cp = 2, chunks of a sequence   0   1   2   3
    rank 0 has                     0           3      its queries see keys up to 0 and up to 3
    rank 1 has                         1   2          its queries see keys up to 1 and up to 2

Queries stay on their rank. Keys and values are gathered, as for Llama 3 (Grattafiori et al. 2024,
section 3.3.2); grouped-query attention has few of them. The backward pass adds up the gradients of
keys and values, and each rank gets those of its positions.

Later positions see more keys. A rank has an early and a late chunk, so all ranks compute the same
number of pairs of a query and a key.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # the compiler knows these
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import CausalBias, CausalVariant

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.degrees import length_problem
from hpctrain.engine.layers.attention import attend

Masks = tuple[torch.Tensor, ...]


class SequencePart:
    """The part of every sequence that a rank has: chunks `rank` and 2 * cp - 1 - `rank`.

    The `group` are the `cp` ranks that divide each sequence, 0 <= rank < cp; None if they never
    communicate.
    """

    def __init__(self, rank: int, cp: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.cp, self.group = rank, cp, group

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the part of this rank of a tensor whose dimension `dim` has all positions."""
        size = self._chunk(x.shape[dim])
        return torch.cat([x.narrow(dim, i * size, size) for i in self._chunks], dim)

    def masks(self, documents: torch.Tensor) -> Masks:
        """Return the masks of `attend` for the number of each position's document, (batch, length).

        For each chunk a mask, bool (batch, 1, length / (2 * cp), end): True where a query may see a
        key. `end` is the end of the chunk. Together they take batch * length^2 * (2 * cp + 1) / (4
        * cp^2) bytes.
        """
        size = self._chunk(documents.shape[1])
        masks = []
        for i in self._chunks:
            queries, keys = documents[:, i * size : (i + 1) * size], documents[:, : (i + 1) * size]
            same = queries[:, :, None] == keys[:, None, :]
            masks.append(same.tril_(i * size)[:, None])
        return tuple(masks)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Masks | None
    ) -> torch.Tensor:
        """Return the causal attention of this rank's queries to the keys of all ranks.

        All ranks of the group call this together, in the forward and the backward pass. The query,
        as the result, is (batch, heads, length / cp, head_dim); key and value have kv_heads, which
        divides heads. `masks` is what `masks` returns; None: every position sees itself and all
        before it.
        """
        if self.cp > 1:
            key, value = _Gather.apply(key, value, self.cp, self.group)  # type: ignore[no-untyped-call]
        return self.attend_to_all(query, key, value, masks)

    def attend_to_all(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Masks | None
    ) -> torch.Tensor:
        """Return what `attend` returns, for keys and values of whole sequences."""
        size, mixed = query.shape[2] // 2, []
        for n, i in enumerate(self._chunks):
            end = (i + 1) * size
            mask = causal_mask(size, end, query.device) if masks is None else masks[n]
            own = query[:, :, n * size : (n + 1) * size]
            mixed.append(attend(own, key[:, :, :end], value[:, :, :end], mask))
        return torch.cat(mixed, 2)

    @property
    def _chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.cp - 1 - self.rank

    def _chunk(self, length: int) -> int:
        if problem := length_problem(length, self.cp, 1):
            raise ConfigError(problem)
        return length // (2 * self.cp)


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the last `queries` of `keys` positions; on NVIDIA's it takes no memory.

    It is bool (queries, keys), or an object for which `scaled_dot_product_attention` chooses a
    kernel that needs no mask. The flash kernel of some builds of torch for AMD's GPUs takes that
    for another mask: query i sees the first i + 1 keys, wherever the queries are.
    """
    if device.type != "cuda" or torch.version.hip:
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    # torch's causal_lower_right allocates memory, and fails within selective checkpointing.
    mask = torch.empty(0).as_subclass(CausalBias)
    mask.variant, mask.seq_len_q, mask.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    return mask


class _Gather(torch.autograd.Function):
    """Gathers keys and values, (batch, heads, length / cp, head_dim), and adds up gradients."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, cp: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.cp, ctx.group = cp, group
        own = torch.stack([key, value])
        parts = collectives.all_gather_tensor(own, 0, group)
        early, late = parts.unflatten(0, (cp, 2)).chunk(2, -2)  # of each rank
        whole = torch.cat([*early.unbind(0), *reversed(late.unbind(0))], -2)
        return whole[0], whole[1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        chunks = torch.stack([key, value]).chunk(2 * ctx.cp, -2)
        parts = torch.stack(
            [torch.cat([chunks[r], chunks[2 * ctx.cp - 1 - r]], -2) for r in range(ctx.cp)]
        )
        own = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", 0, ctx.group)
        return own[0], own[1], None, None
