"""Gradients that are differentiated again, such as forces of energies or gradient penalties.

    forces = -torch.autograd.grad(energies.sum(), positions, create_graph=True)
    loss   = (energies - e)^2 + (forces - f)^2          whose backward goes through both

They work with data parallel (DDP and FSDP2), where `reducing.unused` keeps the parameters until the
second pass. Where torch would give a wrong gradient without an error, it is refused here.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.engine.parallel.grad_tensors import collect_grad_tensors
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.errors import ConfigError

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
