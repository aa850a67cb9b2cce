"""Gradients that are differentiated again, such as forces of energies or gradient penalties.

    forces = -torch.autograd.grad(energies.sum(), positions, create_graph=True)
    loss   = (energies - e)^2 + (forces - f)^2          whose backward goes through both

They work with data parallel (DDP and FSDP2), where `reducing.unused` keeps the parameters until the
second pass. What torch cannot differentiate twice is refused here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.parallel.grad_tensors import collect_grad_tensors
from hpctrain.parallel.mesh import Mesh

_WHAT = "a gradient that is differentiated again (create_graph=True)"
# What torch says, and what it means for a config.
_SAID = {
    "does not currently support double backward": "the compiler cannot: use train.compile=off",
    "selective activation checkpoint": (
        "selective checkpointing cannot: use train.activation_checkpointing=full"
    ),
    "marked with @once_differentiable": (
        "context parallel, expert parallel and statistics over ranks cannot: use parallel.cp=1, "
        "parallel.ep=1 and train.sync_batchnorm=false"
    ),
}


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


@contextmanager
def explained() -> Iterator[None]:
    """Say which key is meant by what torch says about such gradients."""
    try:
        yield
    except RuntimeError as error:
        for said, meaning in _SAID.items():
            if said in str(error):
                raise ConfigError(f"the step computes {_WHAT}; {meaning}") from error
        raise
