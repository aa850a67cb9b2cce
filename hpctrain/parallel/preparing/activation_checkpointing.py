"""Activation checkpointing (Chen et al. 2016): blocks compute their activations again.

The forward function of a block is replaced, not the block, so that all parameters keep their names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # makes its operation known
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hpctrain.models.dry_run import same_buffers, stored_buffers

_Context = AbstractContextManager[object]
_ops = torch.ops.aten
# Matrix products and attention take most of the time of a block, but their results are few.
_KEPT = {
    _ops.mm.default,
    _ops.bmm.default,
    _ops.addmm.default,
    _ops.convolution.default,
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def checkpoint_activations(
    blocks: Sequence[nn.Module], mode: str, every: int, *, compiled: bool = False
) -> None:
    """Let blocks compute activations again in the backward pass instead of keeping them.

    The mode is "none"; "full", which keeps the inputs of a block; or "selective", which keeps the
    results of matrix products and attention too. Of `every` so many blocks the first is changed.
    The compiler computes again what has no effect on buffers, and knows no contexts of ours.
    """
    if mode == "none":
        return
    for block in blocks[::every]:
        options: dict[str, Any] = {"use_reentrant": False}
        if mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        if not compiled and any(True for _ in stored_buffers(block)):
            options["context_fn"] = partial(_contexts, block, options.get("context_fn"))
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # A function of ours: where torch's `checkpoint` itself is the forward function of what is
    # compiled, the compiler leaves it and all below it alone, without a word.
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def _contexts(
    block: nn.Module, contexts: Callable[[], tuple[_Context, _Context]] | None
) -> tuple[_Context, _Context]:
    """Return the contexts of both passes, of which only the first changes buffers."""
    first, second = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return first, _once(block, second)


@contextmanager
def _once(block: nn.Module, second: _Context) -> Iterator[None]:
    with same_buffers(block, stored=True), second:
        yield


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
