"""The tensors with gradients in what a block returns, as FSDP of the installed torch finds them.

torch has functions for that since 2.13, which also look into dataclasses. FSDP of torch 2.10 to
2.12 looks where pytree does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import _common_utils
from torch.utils._pytree import tree_leaves, tree_map


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _collect(output: Any) -> tuple[torch.Tensor, ...]:
    return tuple(filter(_has_gradient, tree_leaves(output)))


def _replace(output: Any, others: Iterator[torch.Tensor]) -> Any:
    return tree_map(lambda leaf: next(others) if _has_gradient(leaf) else leaf, output)


collect_grad_tensors: Callable[[Any], tuple[torch.Tensor, ...]] = getattr(
    _common_utils, "collect_grad_tensors", _collect
)
"""Return the tensors with gradients in nested outputs, in the order of `replace_grad_tensors`."""

replace_grad_tensors: Callable[[Any, Iterator[torch.Tensor]], Any] = getattr(
    _common_utils, "replace_grad_tensors", _replace
)
"""Return nested outputs with other tensors in the places of those with gradients."""
