"""Small tensors that stand for the parameters of a model, whole and divided over the ranks.

There is one for each number of dimensions, each way to divide, and each group of the optimizer. Two
neighbouring parts of a tensor, and two stages of a pipeline, differ in the size of their values and
in how their gradients change. So a norm or a sum of one part is not that of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from hpctrain.checkpoint.optimizer_state import Place
from hpctrain.distributed import objects
from hpctrain.distributed.tensors import dtype_name
from hpctrain.parallel.preparing.parameter_settings import Setting
from hpctrain.parallel.wrappers.parallel_model import ParallelModel

_EXACT = (torch.float64, torch.complex64, torch.complex128)  # others are tried in fp32


@dataclass(frozen=True)
class SmallTensor:
    """A small tensor that stands for parameters."""

    name: str  # the name of the first of these
    shape: tuple[int, ...]  # of the whole tensor
    parts: tuple[int, ...]  # for each dimension, into how many parts ranks divide it
    dtype: str  # as text
    device: str  # its type
    stage: int  # the rank of the pipeline that has it

    def values(self, step: int) -> torch.Tensor:
        """Return the whole parameter (step 0), or its gradient in a step from 1 on."""
        draw = torch.Generator().manual_seed(1000 * self.stage + step + 2)
        same = torch.Generator().manual_seed(1)
        dtype = getattr(torch, self.dtype)
        noise = torch.randn(self.shape, generator=draw, dtype=dtype)
        kept = torch.randn(self.shape, generator=same, dtype=dtype)
        number = torch.full(self.shape, self.stage)
        for dim, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            part = torch.arange(size) * parts // size
            number = number + part.view(-1, *[1] * (len(self.shape) - dim - 1))
        odd = number % 2 == 1
        if step == 0:
            return (noise * torch.where(odd, 0.4, 0.1)).to(self.device)
        return torch.where(odd, noise, 4 * kept + 0.1 * noise).to(self.device)


@dataclass(frozen=True)
class SmallTensors:
    """The small tensors of a model."""

    own: Sequence[SmallTensor]  # those of this rank
    places: Sequence[Place | None]  # how ranks divide each of these; None where none does
    every: Sequence[SmallTensor]  # those of all stages of a pipeline
    of: dict[str, str]  # the name of the small tensor of each parameter of this rank, by name

    @classmethod
    def standing_for(cls, model: ParallelModel, *, by_name: bool) -> SmallTensors:
        """Return small tensors for a model; all ranks call this together.

        With `by_name` the optimizer may treat parameters by their names.
        """
        plain, first, of = Setting(), dict[Any, str](), dict[str, str]()
        own: list[SmallTensor] = []
        places: list[Place | None] = []
        for name, p in zip(model.names, model.parameters, strict=True):
            place = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            kind = re.sub(r"\d+", "#", name) if by_name else ""  # layers.0 and layers.1 are alike
            key = (kind, p.ndim, p.dtype, p.device, place, model.settings.get(name, plain))
            of[name] = first.setdefault(key, name)
            if of[name] == name:
                parts = _parts(p)
                shape = tuple((4 if dim == 0 else 3) * n for dim, n in enumerate(parts))
                dtype = dtype_name(p.dtype if p.dtype in _EXACT else torch.float32)
                stage = model.mesh.pp_rank
                own.append(SmallTensor(name, shape, parts, dtype, p.device.type, stage))
                places.append(place)
        if model.mesh.degrees.pp == 1:
            return cls(own, places, own, of)
        stages = objects.all_gather([asdict(small) for small in own], model.mesh.pp_group)
        found = [each for stage in stages for each in stage]
        tuples = [e | {"shape": tuple(e["shape"]), "parts": tuple(e["parts"])} for e in found]
        return cls(own, places, [SmallTensor(**each) for each in tuples], of)


def _parts(parameter: torch.Tensor) -> tuple[int, ...]:
    parts = [1] * parameter.ndim
    if isinstance(parameter, DTensor):
        for size, place in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if (dim := getattr(place, "dim", None)) is not None:
                parts[dim] *= size
    return tuple(parts)


def placed(value: torch.Tensor, place: Place | None) -> torch.Tensor:
    """Return a tensor that all ranks have whole, divided over them, on the same device."""
    if place is None:
        return value
    divided: torch.Tensor = distribute_tensor(value, *place, src_data_rank=None)
    return divided.to(value.device)  # that of the mesh may be another, if parameters are offloaded
