"""The initial parameters: bit by bit the same for every way to spread a model.

A model with a method `init_module(module)` is built without memory (on the meta device), then
sharded, and then initialised module by module. The random generator is seeded anew with the name of
each module, so no rank ever holds more than one module as a whole.

Any other model is built as usual: on every rank, or when it is sharded on rank 0 alone, which sends
each rank its part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hpctrain.parallel.ties import tie, ties

log = logging.getLogger(__name__)
Build = Callable[[], nn.Module]


@runtime_checkable
class Initializes(Protocol):
    """A model that can initialise its modules one by one."""

    def init_module(self, module: nn.Module) -> None:
        """Initialise the parameters and buffers that `module` itself holds, in place.

        It draws from torch's global generator and reads no other module.
        """
        ...


def skeleton(build: Build, seed: int) -> nn.Module | None:
    """Return the model on the meta device; None when it cannot be built there."""
    try:
        with torch.device("meta"):
            torch.manual_seed(seed)
            return build()
    except Exception as error:  # what is wrong with the model itself is raised by the next build
        # The constructor reads a value, for example, which a tensor without memory does not have.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.info(
                "the model cannot be built on the meta device, so all ranks build it: %s", reason
            )
        return None


def build_whole(build: Build, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the initialised model, whole, on the device.

    Args:
        build: Returns a new model.
        seed: The seed of the run.
        dtype: The dtype of its parameters.
        device: Device of this rank.
    """
    model = skeleton(build, seed)
    if model is not None and isinstance(model, Initializes):
        cast_parameters(model, dtype)
        fill_modules(model, seed, device, device)
        return model
    return build_as_usual(build, seed, dtype, device)


def build_as_usual(build: Build, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the model as its constructor initialises it; the arguments of `build_whole`."""
    torch.manual_seed(seed)
    model = build()
    cast_parameters(model, dtype)
    return model.to(device)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters, in place; buffers, such as statistics, stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def fill_modules(model: nn.Module, seed: int, device: torch.device, storage: torch.device) -> None:
    """Give a model of the meta device memory and its initial parameters.

    Args:
        model: It has `init_module`; whole or sharded.
        seed: The seed of the run.
        device: Initial values are computed on this device.
        storage: Parameters and buffers are stored on this device.
    """
    assert isinstance(model, Initializes)
    allocate(model, storage)
    for name, module in model.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if not own and not any(b is not None for b in module._buffers.values()):
            continue
        torch.manual_seed(xxhash.xxh64_intdigest(f"{seed} {name}".encode()) >> 1)
        # Random numbers are drawn whole and in the default dtype, then cut and converted.
        for key, parameter in own.items():
            whole = torch.empty(parameter.shape, device=device)
            module._parameters[key] = nn.Parameter(whole, parameter.requires_grad)
        with torch.no_grad():
            model.init_module(module)
            for key, parameter in own.items():
                whole = module._parameters[key].data
                module._parameters[key] = parameter
                _own_part(parameter).copy_(_cut(whole, parameter))


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has, without communication."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    # FSDP2 divides what tensor parallel has left, and marks that by a placement of its own.
    dims = sorted(range(mesh.ndim), key=lambda i: isinstance(like.placements[i], _StridedShard))
    for dim in dims:
        placement = like.placements[dim]
        if isinstance(placement, (Shard, _StridedShard)):
            size = -(-whole.shape[placement.dim] // mesh.size(dim))
            begin = min(place[dim] * size, whole.shape[placement.dim])
            end = min(begin + size, whole.shape[placement.dim])
            whole = whole.narrow(placement.dim, begin, end - begin)
    return whole


def fill_from_rank_0(
    model: nn.Module, build: Build, seed: int, device: torch.device, storage: torch.device
) -> None:
    """Give a sharded model of the meta device memory and the parameters that rank 0 builds.

    Args:
        model: Sharded.
        build: Returns a new model; rank 0 calls it, and holds it in the memory of the host.
        seed: The seed of the run.
        device: Device of the rank, for the communication.
        storage: Parameters and buffers are stored on this device.
    """
    allocate(model, storage)
    state: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        whole = build()
        dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
        state = {
            name: value.to(dtypes.get(name, value.dtype))
            for name, value in whole.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        buffers = dict(whole.named_buffers())
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=storage.type == "cpu"
    )
    set_model_state_dict(model, state, options=options)
    # Buffers that are not part of a state dict have to be sent too.
    for name, buffer in model.named_buffers():
        value = buffers[name].to(device) if buffers else torch.empty_like(buffer, device=device)
        dist.broadcast(value, src=0)
        buffer.copy_(value)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of the meta device memory, and keep ties between them."""
    shared = list(ties(model))
    model.to_empty(device=device)
    for first, others in shared:
        tie(model, first, others)
