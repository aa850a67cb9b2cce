"""Activation checkpointing (Chen et al. 2016): blocks compute their activations again.

The forward function of a block is replaced, not the block, so that all parameters keep their names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # makes its operation known
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hpctrain.data.generators import same_again
from hpctrain.engine.layers.dry_run import BufferValues, stored_buffers
from hpctrain.engine.parallel.second_gradients import in_backward

_ops = torch.ops.aten
# Matrix products and attention take most of the time of a block, but their results are few.
_KEPT = {
    _ops.mm.default,
    _ops.bmm.default,
    _ops.addmm.default,
    _ops._grouped_mm.default,
    _ops._scaled_mm.default,
    _ops.convolution.default,
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def checkpoint_activations(blocks: Sequence[nn.Module], mode: str) -> None:
    """Let blocks compute activations again in the backward pass instead of keeping them.

    The mode is "none"; "full", which keeps the inputs of a block; or "selective", which keeps the
    results of matrix products and attention too.
    """
    if mode == "none":
        return
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        options: dict[str, Any] = {"use_reentrant": False}
        if mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        if any(True for _ in stored_buffers(block)):
            forward = partial(_once, block, forward)
        # Partials, unlike closures, refer to the copy in a copy of the block.
        block.forward = partial(_checkpointed, forward, options)


def _checkpointed(
    forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    # A function of ours: where torch's `checkpoint` itself is the forward function of what is
    # compiled, the compiler leaves it and all below it alone, without a word.
    if not torch.compiler.is_compiling():  # the compiler knows no contexts of ours
        forward = same_again(forward)
    return checkpoint(forward, *args, **options, **kwargs)


def _once(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward function of a block, of which only the first pass changes buffers."""
    # The compiler computes again what has no effect on buffers; a block that it cannot compile is
    # computed again by `checkpoint`. It knows no contexts of ours.
    if torch.compiler.is_compiling() or not in_backward():
        return forward(*args, **kwargs)
    buffers = BufferValues(block, stored=True)
    # Selective checkpointing refuses operations that the first pass has not made.
    with _disable_current_modes():
        buffers.keep()
    try:
        return forward(*args, **kwargs)
    finally:
        with _disable_current_modes():
            buffers.restore()


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
