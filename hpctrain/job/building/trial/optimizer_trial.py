"""A trial of the optimizer on small tensors, before the first step of a training.

    small tensors, whole ──────── 4 steps ──┬── the same numbers? ── else ddp is the cure
    small tensors, divided ────── 4 steps ──┘   as the ranks divide the model
    small tensors ── 2 steps ── saved, loaded ── 2 steps ── the same as 4 steps?

An optimizer that takes a norm or a sum over a parameter gets the one of a rank's part where ranks
divide it: `DTensor.norm().item()` is that in torch, without a word. And what an optimizer keeps
outside of its state is lost when a run is resumed.

The trial makes optimizers of its own and leaves nothing behind.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.optimizer_modes import OptimizerModes
from hpctrain.checkpoint.optimizer_state import Layout, OptimizerState, Place
from hpctrain.config.rules.parameter_rules import NEEDS_CLOSURE, NEEDS_SPARSE
from hpctrain.config.schema import OptimizerConfig
from hpctrain.distributed import objects
from hpctrain.distributed.tensors import local
from hpctrain.errors import ConfigError
from hpctrain.job.building.build_optimizer import optimizer_of, takes_names
from hpctrain.job.building.trial.small_tensors import SmallTensor, SmallTensors, placed
from hpctrain.job.building.trial.untouched import untouched
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.training.schedule import rate_ratios, set_rates

log = logging.getLogger(__name__)

_STEPS, _SAVED = 4, 2
_LR = 0.02  # large enough that rounding is small beside what a step changes
_SAID, _REFUSED = 1e-3, 0.1  # of what the steps change; Muon in bf16 differs by up to 0.02
_ROUNDING = 2e-6  # of the largest parameter
# These compute each element by itself and keep all in their state, as our tests show. torch cannot
# divide some that are fused.
_KNOWN = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
_CURE = "use parallel=ddp, or an optimizer that computes each element by itself (optimizer=adamw)"


class _Unmade(Exception):
    """The optimizer takes no small tensors, such as one with rules for sizes."""


@dataclass
class _Ended:
    """Where a trial has ended."""

    weights: list[torch.Tensor]
    numbers: dict[str, float]
    state: dict[str, Any]


class OptimizerTrial:
    """Tries the optimizer of a model, and leaves it as it is; see the module."""

    def __init__(
        self, config: OptimizerConfig, model: ParallelModel, optimizer: torch.optim.Optimizer
    ) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._state: dict[str, dict[str, Place | None]] = {}
        self._target = f"optimizer._target_={config._target_}"

    def run(self) -> Layout:
        """Try the optimizer; all ranks call this together. Return how ranks divide its states.

        It is a ConfigError if the optimizer would train another model than in one process, could
        not go on from a checkpoint, or needs what a step does not give it.
        """
        fused = any("fused" in repr(o) for o in (self._config.options, self._config.groups))
        if self._config._target_ in _KNOWN and not fused:
            return lambda _: None
        return self.tried()

    def tried(self) -> Layout:
        """Do what `run` does, also for torch's common optimizers."""
        names = takes_names(self._config._target_)
        self._small = SmallTensors.standing_for(self._model, by_name=names)
        try:
            whole = self._steps(self._small.every)
            self._note(whole)
            self._check_resumed(whole)
            if self._model.mesh.degrees.pp > 1 or any(self._small.places):
                self._check_divided(whole)
        except _Unmade as error:
            self._unknown(error)
        return self._layout

    def _layout(self, name: str) -> Mapping[str, Place | None] | None:
        return self._state.get(self._small.of.get(name, ""))

    def _steps(
        self, small: Sequence[SmallTensor], places: Sequence[Place | None] = (), seed: int = 0
    ) -> _Ended:
        """Return where the steps end, with whole tensors or with divided ones."""
        with self._untouched(seed):
            trained = self._make(small, places)
            try:
                for step in range(_STEPS):
                    trained.step(step)
            except Exception as error:
                if places:
                    raise
                self._explain(error)
                raise _Unmade(_said(error)) from error
            return trained.ended()

    def _make(self, small: Sequence[SmallTensor], places: Sequence[Place | None] = ()) -> _Trained:
        where = places or [None] * len(small)
        values = [
            [placed(each.values(step), place) for each, place in zip(small, where, strict=True)]
            for step in range(_STEPS + 1)
        ]
        names, parameters = [each.name for each in small], [nn.Parameter(v) for v in values[0]]
        try:
            optimizer = optimizer_of(self._config, names, parameters, self._model.settings)
        except Exception as error:
            raise _Unmade(_said(error)) from error
        return _Trained(optimizer, names, parameters, values[1:], self._config.lr)

    def _resumed(self) -> _Ended:
        """Return where the steps end if another optimizer goes on from a saved state."""
        with self._untouched():
            before = self._make(self._small.every)
            for step in range(_SAVED):
                before.step(step)
            drawn = torch.get_rng_state()
            with before.modes.evaluating():
                saved, training = copy.deepcopy(before.state.flat()), before.modes.training
                weights = [p.detach().clone() for p in before.parameters]
        with self._untouched():
            after = self._make(self._small.every)
            for parameter, value in zip(after.parameters, weights, strict=True):
                parameter.data.copy_(value)
            after.state.load(saved)
            after.modes.restore(training)
            torch.set_rng_state(drawn)
            for step in range(_SAVED, _STEPS):
                after.step(step)
            return after.ended()

    def _check_resumed(self, whole: _Ended) -> None:
        """Refuse an optimizer that keeps something where a checkpoint does not find it."""
        try:
            why = self._unlike(self._resumed(), whole)
        except (_Unmade, ConfigError):
            raise
        except Exception as error:
            why = f"it ends with {_said(error)}"
        if why:
            raise ConfigError(
                f"{self._target}: when it goes on from a checkpoint, {why}. A checkpoint has "
                "state_dict() of the optimizer, which by default is state[parameter] and "
                "param_groups. An attribute, or another optimizer within it, would be lost: keep "
                "what it needs in these two"
            )

    def _unlike(self, found: _Ended, whole: _Ended) -> str:
        """Return how a resumed trial differs from the other; "" if it does not."""
        if not (_worst(found.weights, whole.weights) or _unequal(found, whole, whole)):
            return ""
        noise = self._steps(self._small.every, seed=1)
        difference = self._difference(found.weights, whole.weights, whole, noise)
        if difference > _SAID:
            return f"its next steps are others, by {difference:.0%} of what they change"
        number = _unequal(found, whole, noise)
        return f"param_groups[...]['{number}'] is another number" if number else ""

    def _check_divided(self, whole: _Ended) -> None:
        """Compare the steps on divided tensors with those on whole ones, over all ranks."""
        noise = self._steps(self._small.every, seed=1)  # on all ranks: it may communicate
        error, number, difference = "", "", 0.0
        try:
            divided = self._steps(self._small.own, self._small.places)
            self._note(divided)
            theirs = [local(value) for value in divided.weights]
            difference = self._difference(theirs, self._parts_of(whole), whole, noise)
            number = _unequal(divided, whole, noise)
        except _Unmade:
            raise
        except Exception as raised:
            error = _said(raised)
        ranks = objects.all_gather((error, number, difference))
        error, number = (next((rank[i] for rank in ranks if rank[i]), "") for i in (0, 1))
        difference = max(rank[2] for rank in ranks)
        how = ", ".join(f"{name}={size}" for name, size in self._model.layout.items())
        if error:
            raise ConfigError(
                f"{self._target} does not work where ranks divide the model ({how}): {error}; "
                + ("give ++optimizer.options.fused=false, or " if "_fused_" in error else "")
                + _CURE
            )
        if number or difference > _REFUSED:
            what = f"param_groups[...]['{number}'] is another number than in one process"
            if not number:
                what = f"its steps on small tensors differ by {difference:.0%} from one process"
            raise ConfigError(
                f"{self._target}: where ranks divide the model ({how}), {what}. It takes a norm or "
                "a sum over a whole parameter or the whole model, and gets that of a rank's part; "
                f"{_CURE}"
            )
        if difference > _SAID and dist.get_rank() == 0:
            log.warning(
                "%s: where ranks divide the model (%s), its steps on small tensors differ by "
                "%.1f%% from those of one process, by rounding: the runs will not be quite equal",
                *(self._target, how, 100 * difference),
            )

    def _parts_of(self, whole: _Ended) -> list[torch.Tensor]:
        """Return this rank's parts of the whole weights, as they are trained and evaluated."""
        names = [small.name for small in self._small.every]
        places = dict(zip((s.name for s in self._small.own), self._small.places, strict=True))
        pairs = zip([*names, *names], whole.weights, strict=True)
        return [local(placed(value, places[name])) for name, value in pairs if name in places]

    def _difference(
        self, found: list[torch.Tensor], expected: list[torch.Tensor], whole: _Ended, noise: _Ended
    ) -> float:
        """Return the largest difference, relative to the largest change by the steps.

        An optimizer that draws random numbers, as for stochastic rounding, may differ by so much as
        it differs from itself with another seed.
        """
        begin = [small.values(0) for small in self._small.every]
        change = max(_worst(whole.weights[: len(begin)], begin), _ROUNDING)
        largest = max(float(value.abs().max()) for value in begin)
        allowed = _ROUNDING * largest + 4 * _worst(noise.weights, whole.weights)
        return max(_worst(found, expected) - allowed, 0.0) / change

    def _note(self, ended: _Ended) -> None:
        """Keep which states the optimizer has made, and how ranks divide them."""
        for small in self._small.own:
            start = f"state.{small.name}."
            own = {k.removeprefix(start): v for k, v in ended.state.items() if k.startswith(start)}
            self._state[small.name] = {
                key: (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
                for key, value in own.items()
            }

    def _explain(self, error: Exception) -> None:
        """Raise a ConfigError if a step of the training would fail for the same reason."""
        if self._works_with_closure():
            raise ConfigError(f"{self._target} {NEEDS_CLOSURE}") from error
        if "sparse" in str(error).lower():
            raise ConfigError(f"{self._target} {NEEDS_SPARSE}") from error

    def _unknown(self, error: Exception) -> None:
        if dist.get_rank() == 0:
            log.warning(
                "%s could not be tried on small tensors (%s). So it is not known whether it trains "
                "the same in every layout and after a resume",
                *(self._target, error),
            )

    def _works_with_closure(self) -> bool:
        with suppress(Exception), self._untouched():
            self._make(self._small.every).step(0, closure=True)
            return True
        return False

    def _untouched(self, seed: int = 0) -> AbstractContextManager[None]:
        return untouched(self._optimizer, seed)


class _Trained:
    """Small parameters, their optimizer, and their gradients in each step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        parameters: list[nn.Parameter],
        gradients: list[list[torch.Tensor]],
        lr: float,
    ) -> None:
        self.optimizer, self.parameters, self._gradients = optimizer, parameters, gradients
        self._ratios = rate_ratios(optimizer, lr)
        self.state = OptimizerState(optimizer, names, parameters)
        self.modes = OptimizerModes(optimizer, names, parameters, lambda: None)

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

    def ended(self) -> _Ended:
        """Return the result; the optimizer is not used any more."""
        weights = [p.detach().clone() for p in self.parameters]
        with self.modes.evaluating():
            weights += [p.detach().clone() for p in self.parameters]
            return _Ended(weights, self.state.numbers(every=True), self.state.flat())


def _worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of tensors; infinite if one of two is not a number."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().masked_fill(same, 0).max()
        worst = max(worst, math.inf if apart.isnan() else float(apart))
    return worst


def _unequal(found: _Ended, expected: _Ended, other: _Ended) -> str:
    """Return the key of a number that is not as expected; "" if all are.

    `other` is the end with another seed: an optimizer may draw a number.
    """
    for name, value in found.numbers.items():
        known = expected.numbers.get(name, value)
        drawn = other.numbers.get(name, known)
        near = math.isclose(value, known, rel_tol=_SAID, abs_tol=4 * abs(drawn - known))
        if not near and not (math.isnan(value) and math.isnan(known)):
            return name.rpartition(".")[2]
    return ""


def _said(error: Exception) -> str:
    """Return the first sentence of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0][:300]
