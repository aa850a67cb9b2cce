"""A training of small tensors by an optimizer that is tried, and how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpctrain.checkpoint.optimizer_modes import OptimizerModes
from hpctrain.checkpoint.optimizer_state import OptimizerState, Place
from hpctrain.job.building.trial.small_tensors import SmallTensor, placed
from hpctrain.training.schedule import rate_ratios, set_rates

STEPS = 4
_LR = 0.02  # large enough that rounding is small beside what a step changes
_ROUNDING = 2e-6  # of the largest parameter
Make = Callable[[list[str], list[nn.Parameter]], torch.optim.Optimizer]


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

    `make` makes the optimizer of these names and parameters, whose learning rate is `lr`. With
    `places` ranks divide the tensors.
    """

    def __init__(
        self, make: Make, lr: float, small: Sequence[SmallTensor], places: Sequence[Place | None]
    ) -> None:
        where = places or [None] * len(small)
        values, *self._gradients = (
            [placed(each.values(step), place) for each, place in zip(small, where, strict=True)]
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
