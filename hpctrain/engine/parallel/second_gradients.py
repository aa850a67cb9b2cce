"""Gradients that are differentiated again, such as forces of energies or gradient penalties.

    forces = -torch.autograd.grad(energies.sum(), positions, create_graph=True)
    loss   = (energies - e)^2 + (forces - f)^2          whose backward goes through both

They work with data parallel (DDP and FSDP2), where `reducing.unused` keeps the parameters until the
second pass. Where torch would give a wrong gradient without an error, it is refused here.

The tensors with gradients in what a block returns are those that FSDP of the installed torch finds.
torch has functions for that since 2.13, which also look into dataclasses. FSDP of torch 2.10 to
2.12 looks where pytree does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import _common_utils
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.base.errors import ConfigError
from hpctrain.engine.parallel.mesh import Mesh


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


_WHAT = "a gradient that is differentiated again (create_graph=True)"


def in_backward() -> bool:
    """Return whether the code that asks is called by a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_first() -> bool:
    """Return whether the code is called by a backward pass that is differentiated again."""
    return in_backward() and torch.is_grad_enabled()


def refuse(blocks: Sequence[nn.Module], mesh: Mesh) -> None:
    """Let blocks refuse such gradients if their layers are divided, or others have the rest.

    The gradients of DTensors are wrong when they are differentiated again, without an error.
    """
    degrees = mesh.degrees
    if degrees.tp == 1 and degrees.pp == 1:
        return
    given = "tp" if degrees.tp > 1 else "pp"
    text = f"parallel.{given}={getattr(degrees, given)}: the model computes {_WHAT}"
    text += ", which is only right with whole layers on a rank: use ddp, zero or hsdp alone"
    for block in blocks:
        block.register_forward_hook(partial(_watch, text))


def _watch(text: str, _: nn.Module, __: Any, outputs: Any) -> None:
    for tensor in collect_grad_tensors(outputs) if torch.is_grad_enabled() else ():
        tensor.register_hook(partial(_refuse, text))


def _refuse(text: str, _: torch.Tensor) -> None:
    if is_first():
        raise ConfigError(text)
