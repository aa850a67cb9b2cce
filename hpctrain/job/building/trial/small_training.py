"""Small tensors that stand for the parameters of a model, and a training of them by its optimizer.

There is one for each number of dimensions, each way to divide, and each group of the optimizer. Two
neighbouring parts of a tensor, and two stages of a pipeline, differ in the size of their values and
in how their gradients change. So a norm or a sum of one part is not that of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hpctrain.checkpoint.optimizer_modes import OptimizerModes
from hpctrain.checkpoint.optimizer_state import OptimizerState, Place
from hpctrain.distributed import objects
from hpctrain.distributed.tensors import dtype_name
from hpctrain.parallel.preparing.parameter_settings import Setting
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.training.schedule import rate_ratios, set_rates

STEPS = 4
_LR = 0.02  # large enough that rounding is small beside what a step changes
_ROUNDING = 2e-6  # of the largest parameter
_EXACT = (torch.float64, torch.complex64, torch.complex128)  # others are tried in fp32
Make = Callable[[list[str], list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class SmallTensor:
    """A small tensor that stands for parameters."""

    name: str  # the name of the first of these
    shape: tuple[int, ...]  # of the whole tensor
    parts: tuple[int, ...]  # for each dimension, into how many parts ranks divide it
    dtype: str  # as text
    device: str  # its type
    stage: int  # the rank of the pipeline that has it
    # How ranks divide it; None where none does, or where another stage has it.
    place: Place | None = field(default=None, repr=False)

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
    every: Sequence[SmallTensor]  # those of all stages of a pipeline
    of: dict[str, str]  # the name of the small tensor of each parameter of this rank, by name

    @classmethod
    def standing_for(cls, model: ParallelModel, *, by_name: bool) -> SmallTensors:
        """Return small tensors for a model; all ranks call this together.

        With `by_name` the optimizer may treat parameters by their names.
        """
        plain, first, of = Setting(), dict[Any, str](), dict[str, str]()
        own: list[SmallTensor] = []
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
                own.append(SmallTensor(name, shape, parts, dtype, p.device.type, stage, place))
        if model.mesh.degrees.pp == 1:
            return cls(own, own, of)
        mine = [(s.name, s.shape, s.parts, s.dtype, s.device, s.stage) for s in own]
        every = [
            SmallTensor(name, tuple(shape), tuple(parts), *others)
            for stage in objects.all_gather(mine, model.mesh.pp_group)
            for name, shape, parts, *others in stage
        ]
        return cls(own, every, of)


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


class UnmadeError(Exception):
    """The optimizer takes no small tensors, such as one with rules for sizes."""


@dataclass
class Ended:
    """Where a training has ended: its parameters as they are trained, then as evaluated."""

    weights: list[torch.Tensor]
    numbers: dict[str, float]
    state: dict[str, Any]

    def unequal_number(self, expected: Ended, other: Ended, near: float) -> str:
        """Return the key of a number that is not as expected; "" if all are.

        `other` is the end with another seed: an optimizer may draw a number.
        """
        for name, value in self.numbers.items():
            known = expected.numbers.get(name, value)
            drawn = other.numbers.get(name, known)
            same = math.isclose(value, known, rel_tol=near, abs_tol=4 * abs(drawn - known))
            if not same and not (math.isnan(value) and math.isnan(known)):
                return name.rpartition(".")[2]
        return ""


class SmallTraining:
    """Small parameters, their optimizer, and their gradients in each step.

    `make` makes the optimizer of these names and parameters, whose learning rate is `lr`. If they
    are `divided`, each rank has its part of the tensors.
    """

    def __init__(
        self, make: Make, lr: float, small: Sequence[SmallTensor], *, divided: bool
    ) -> None:
        values, *self._gradients = (
            [placed(each.values(step), each.place if divided else None) for each in small]
            for step in range(STEPS + 1)
        )
        names, self.parameters = [each.name for each in small], [nn.Parameter(v) for v in values]
        try:
            self.optimizer = make(names, self.parameters)
        except Exception as error:
            raise UnmadeError(first_sentence(error)) from error
        self._ratios = rate_ratios(self.optimizer, lr)
        self.state = OptimizerState(self.optimizer, names, self.parameters)
        self.modes = OptimizerModes(self.optimizer, names, self.parameters, lambda: None)

    def step(self, number: int, *, closure: bool = False) -> None:
        """Make a step as a training does."""
        if number == 0:
            self.modes.train()
        for parameter, gradient in zip(self.parameters, self._gradients[number], strict=True):
            parameter.grad = gradient.clone()
        set_rates(self.optimizer, _LR, self._ratios)
        if closure:
            self.optimizer.step(lambda: 1.0)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the parameters as they are now."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def ended(self) -> Ended:
        """Return the result; the optimizer is not used any more."""
        weights = self.weights()
        with self.modes.evaluating():
            weights += self.weights()
            return Ended(weights, self.state.numbers(every=True), self.state.flat())


def worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of tensors; infinite if one of two is not a number."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().masked_fill(same, 0).max()
        largest = max(largest, math.inf if apart.isnan() else float(apart))
    return largest


def difference(
    small: Sequence[SmallTensor],
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    whole: Ended,
    noise: Ended,
) -> float:
    """Return the largest difference, relative to the largest change by the steps.

    An optimizer that draws random numbers, as for stochastic rounding, may differ by so much as
    `whole` differs from `noise`, which had another seed.
    """
    begin = [each.values(0) for each in small]
    change = max(worst(whole.weights[: len(begin)], begin), _ROUNDING)
    largest = max(float(value.abs().max()) for value in begin)
    allowed = _ROUNDING * largest + 4 * worst(noise.weights, whole.weights)
    return max(worst(found, expected) - allowed, 0.0) / change


def first_sentence(error: Exception) -> str:
    """Return the class and the first sentence of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0][:300]
