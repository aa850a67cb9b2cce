"""What one rank of a world holds: its part of the parameters, gradients and optimizer state.

The whole recipe runs as in a training, on the meta device, with one step of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.initial import Build
from hpctrain.parallel.recipe import parallelize
from hpctrain.parallel.wrappers.parallel_model import ParallelModel


@dataclass(frozen=True)
class RankPart:
    """The part of one rank."""

    parameters: int  # elements of the whole model, or of this rank's stages
    whole: tuple[str, ...]  # not divided
    too_large: tuple[str, ...]  # of which the rank has more than its part
    local_parameters: int  # bytes
    local_gradients: int  # bytes
    local_optimizer: int  # bytes that the optimizer keeps, as AdamW would
    shared: int  # additional names of tied parameters


def part_of(
    build: Build, config: Config, *, loss_parallel: bool = False
) -> tuple[RankPart, ParallelModel]:
    """Return what the rank of this process holds, and its model on the meta device."""
    degrees = Degrees.of(config.parallel, distributed.get_world_size())
    mesh = Mesh(degrees, distributed.get_rank(), torch.device("cpu"))
    precision = Precision(config.precision, torch.device("meta"))
    parallel = parallelize(build, config, mesh, precision, loss_parallel=loss_parallel)
    optimizer = torch.optim.AdamW(parallel.parameters)
    for parameter in parallel.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    named = list(parallel.module.named_parameters())
    part = RankPart(
        parameters=sum(p.numel() for p in parallel.parameters),
        whole=tuple(name for name, p in named if not isinstance(p, DTensor)),
        too_large=tuple(name for name, p in named if not _divided(p, degrees)),
        local_parameters=sum(map(_local_bytes, parallel.parameters)),
        local_gradients=sum(_local_bytes(p.grad) for p in parallel.parameters),
        local_optimizer=sum(map(_local_bytes, _states(optimizer))),
        shared=len(list(parallel.module.named_parameters(remove_duplicate=False))) - len(named),
    )
    optimizer.zero_grad(set_to_none=True)
    return part, parallel


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().nbytes())


def _divided(parameter: torch.Tensor, degrees: Degrees) -> bool:
    """Whether FSDP2 divides the rows of what tensor parallel leaves of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    shape = list(parameter.shape)
    if "tp" in names and isinstance(by_tp := parameter.placements[names.index("tp")], Shard):
        shape[by_tp.dim] //= degrees.tp
    rows = -(-shape[0] // (degrees.dp_shard * degrees.cp))
    return _local_bytes(parameter) <= rows * math.prod(shape[1:]) * parameter.element_size()
