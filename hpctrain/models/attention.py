"""Causal attention with grouped queries and rotary position embeddings."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from hpctrain.engine.distributed.tensors import wide
from hpctrain.engine.layers.attention import attend, flash_takes
from hpctrain.models.layers import Linear

Rotation = tuple[torch.Tensor, torch.Tensor]
Masks = tuple[torch.Tensor, ...]
_KNOWN = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)}
if "window_size" not in _KNOWN:  # torch 2.10
    _CAUSAL = {"is_causal": True}


class Documents(NamedTuple):
    """Where documents begin in a batch whose rows are put end to end, as a kernel needs them.

    `bounds` are the first positions of all documents, and the number of positions, int32
    (documents + 1,); `longest` is the number of tokens of the longest document.
    """

    bounds: torch.Tensor
    longest: int

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(cls, positions: torch.Tensor) -> Documents:
        """Return the documents of the positions within them, (batch, length), which begin at 0.

        The host waits for the GPU, because it starts a kernel for each document.
        """
        begins = positions.flatten().eq(0).nonzero().flatten()
        bounds = F.pad(begins, (0, 1), value=positions.numel()).int()
        return cls(bounds, int(bounds.diff().max()))

    @staticmethod
    def fit(x: torch.Tensor, head_dim: int) -> bool:
        """Return whether attention to what is computed from `x` can do without masks.

        The flash kernel of torch takes documents on NVIDIA's GPUs.
        """
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
        on_gpu = x.device.type == "cuda" and torch.version.hip is None
        return on_gpu and head_dim % 8 == 0 and flash_takes(x.device, dtype, head_dim)


class Context(Protocol):
    """The part of every sequence that a rank has under context parallel."""

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the part of this rank of a tensor whose dimension `dim` has all positions."""

    def masks(self, documents: torch.Tensor) -> Masks:
        """Return the masks of `attend` for the documents of whole rows, (batch, length)."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Masks | None
    ) -> torch.Tensor:
        """Return the causal attention of the queries of this rank to the keys of all ranks.

        Queries are (batch, heads, positions of this rank, head_dim); keys and values have kv_heads.
        `masks` is what `masks` returned; None: each row is one document.
        """


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, dim: int, heads: int, kv_heads: int, bias: bool, std: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        width = kv_heads * self.head_dim
        self.query = Linear(dim, dim, bias)
        self.key = Linear(dim, width, bias)
        self.value = Linear(dim, width, bias)
        self.out = Linear(dim, dim, bias, std)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        masks: Masks | Documents | None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """Mix the values of the positions that each position may see.

        `x` and the result are (batch, length, dim); with a context, of the part of the positions
        that `x` has. `rotation` is what `rotary` returns; None does not rotate. `masks` is one bool
        tensor (batch, 1, length, length), True where a query (third axis) may see a key (fourth
        axis), or `Documents`; with a context what its `masks` returned. None: every position sees
        itself and those before it.
        """
        # -1 instead of the number of heads: under tensor parallelism a rank has a part of them.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if isinstance(masks, Documents):
            mixed = attend_within(query, key, value, masks)
        elif context is not None:
            mixed = context.attend(query, key, value, masks)
        else:
            mixed = attend(query, key, value, None if masks is None else masks[0])
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def attend_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents
) -> torch.Tensor:
    """Return what `attend` returns where each position sees its own document up to itself."""
    groups, options = query.shape[1] // key.shape[1], _CAUSAL
    if "enable_gqa" in _KNOWN:
        options = options | {"enable_gqa": groups > 1}
    elif groups > 1:  # before torch 2.12
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    rows = query.shape[0], query.shape[2]
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    bounds, longest = documents
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    assert isinstance(out, torch.Tensor)
    mixed: torch.Tensor = out.unflatten(0, rows).transpose(1, 2)
    return mixed


def rotary(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> Rotation:
    """Return the cosines and sines of the rotary embedding, which `rotate` applies.

    They are computed in each forward pass, because a buffer would lose precision in bfloat16, and
    need care on the meta device. The positions are integers, (batch or 1, length); pair i of a head
    turns by theta^(-2 i / head_dim) for each. Both results are (batch or 1, 1, length,
    head_dim / 2), in float32, or in float64 if `dtype`, that of the model, is.
    """
    wide_dtype = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, head_dim, 2, dtype=wide_dtype, device=positions.device)
    angles = positions[:, None, :, None] * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angles of its position.

    Llama's own code pairs neighbours instead; Hugging Face's weights are sorted for this order. `x`
    is (batch, heads, length, head_dim), as is the result, computed in float32 or float64.
    """
    cos, sin = rotation
    first, second = wide(x).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(x)
