"""Attention by a kernel that does not keep all scores, for models and for context parallel."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from hpctrain.engine.layers.gpu_support import can


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention of queries to keys, by a kernel that does not keep all scores.

    The query, as the result, is (batch, heads, length, head_dim); key and value are (batch,
    kv_heads, keys, head_dim), and kv_heads divides heads. The mask is bool, and broadcasts to
    (batch, heads, length, keys): True where a query may see a key; or a `CausalBias`. None: keys
    are as many as queries, and each query sees those up to its own position.

    On a GPU the flash kernel takes grouped heads as they are, but only without a mask and in 16
    bits. torch would compute other grouped attention in its math kernel, which makes and keeps all
    scores. There each key and value is repeated for its queries, and the memory-efficient kernel
    computes.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type == "cuda":
        flash = mask is None or isinstance(mask, CausalBias)
        if not (flash and flash_takes(query.device, query.dtype, query.shape[-1])):
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            groups = 1
    out: torch.Tensor = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, enable_gqa=groups > 1
    )
    return out


def flash_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash kernel takes heads of this format and size on a GPU."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and head_dim <= 192 and _has_flash(device)  # wider heads train on some GPUs only


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_flash(device: torch.device) -> bool:
    return can("flash", device)
