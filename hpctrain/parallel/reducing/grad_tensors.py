"""The tensors with gradients in what a block returns, as FSDP of the installed torch finds them.

torch has functions for that since 2.13, which also look into dataclasses. FSDP of an older torch
looks where pytree does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
except ImportError:  # torch 2.10 to 2.12

    def _has_gradient(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad

    def collect_grad_tensors(output: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors with gradients in nested outputs, in the order of pytree."""
        return tuple(filter(_has_gradient, tree_leaves(output)))

    def replace_grad_tensors(output: Any, tensor_iter: Iterator[torch.Tensor]) -> Any:
        """Return the outputs with other tensors in the places of those with gradients."""
        return tree_map(lambda leaf: next(tensor_iter) if _has_gradient(leaf) else leaf, output)


__all__ = ["collect_grad_tensors", "replace_grad_tensors"]
