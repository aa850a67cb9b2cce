"""A trial of the optimizer on small tensors, before the first step of a training.

    small tensors, whole ──────── 4 steps ──┬── the same numbers? ── else ddp is the cure
    small tensors, divided ────── 4 steps ──┘   as the ranks divide the model
    small tensors ── 2 steps ── saved, loaded ── 2 steps ── the same as 4 steps?

An optimizer that takes a norm or a sum over a parameter gets the one of a rank's part where ranks
divide it: `DTensor.norm().item()` is that in torch, without a word. Two parts of a small tensor
have other magnitudes and gradients, so that such a number differs much. The tensors stand for the
parameters: one for each number of dimensions, each way to divide, and each group.

Nothing of it is left: the trial makes optimizers of its own, and puts back the random state and what
classes have counted.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import optimizer as torch_optimizer

from hpctrain.checkpoint.optimizer_modes import OptimizerModes
from hpctrain.checkpoint.optimizer_state import Layout, OptimizerState, Place
from hpctrain.config.schema import OptimizerConfig
from hpctrain.distributed import objects
from hpctrain.errors import ConfigError
from hpctrain.job.building.build_optimizer import optimizer_of, takes_names
from hpctrain.parallel.preparing.parameter_settings import Setting
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.training.schedule import rate_ratios, set_rates

log = logging.getLogger(__name__)

_STEPS, _SAVED = 4, 2
_LR = 0.02  # large enough that rounding is small beside what a step changes
_SAID, _REFUSED = 1e-3, 2e-2  # of what the steps have changed
_ROUNDING = 2e-6  # of the largest parameter
_CURE = "use parallel=ddp, or an optimizer that computes each element by itself (optimizer=adamw)"


@dataclass(frozen=True)
class _Small:
    """A small tensor that stands for parameters.

    Attributes:
        name: The name of the first of these.
        shape: Of the whole tensor.
        parts: For each dimension, into how many parts ranks divide it.
        dtype: As text.
        device: Its type.
        stage: The rank of the pipeline that has it.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    dtype: str
    device: str
    stage: int

    def values(self, step: int) -> torch.Tensor:
        """Return the parameter (step 0), or its gradient at a step from 1 on, on the CPU."""
        draw = torch.Generator().manual_seed(1000 * self.stage + step + 2)
        same = torch.Generator().manual_seed(1)  # a part of each gradient stays as it is
        dtype = getattr(torch, self.dtype)
        noise = torch.randn(self.shape, generator=draw, dtype=dtype)
        kept = torch.randn(self.shape, generator=same, dtype=dtype)
        number = torch.full(self.shape, self.stage)
        for dim, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            part = torch.arange(size) * parts // size
            number = number + part.view(-1, *[1] * (len(self.shape) - dim - 1))
        odd = number % 2 == 1
        if step == 0:
            return noise * 0.1 * torch.where(odd, 4.0, 1.0)
        return torch.where(odd, noise, 4 * kept + 0.1 * noise)


@dataclass
class _Ended:
    """Where a trial has ended.

    Attributes:
        weights: The parameters, in training and evaluation.
        numbers: The numbers in the groups of parameters.
        state: What the optimizer keeps, by name.
    """

    weights: list[torch.Tensor]
    numbers: dict[str, float]
    state: dict[str, Any]


class OptimizerTrial:
    """Tries the optimizer of a config; see the module.

    Args:
        config: The section `optimizer`.
        model: The model on its ranks.
        optimizer: The optimizer of the model, which is left as it is.
    """

    def __init__(
        self, config: OptimizerConfig, model: ParallelModel, optimizer: torch.optim.Optimizer
    ) -> None:
        self._config, self._model, self._optimizer = config, model, optimizer
        self._names, self._own, self._places = self._represented()
        self._all = self._own
        if model.mesh.degrees.pp > 1:
            stages = objects.all_gather([vars(small) for small in self._own], model.mesh.pp_group)
            found = [each for stage in stages for each in stage]
            self._all = [
                _Small(**each | {"shape": tuple(each["shape"]), "parts": tuple(each["parts"])})
                for each in found
            ]
        self._state: dict[str, dict[str, Place | None]] = {}

    def layout(self, name: str) -> Mapping[str, Place | None] | None:
        """Return the places of the states that the optimizer has made for a parameter."""
        return self._state.get(self._names.get(name, ""))

    def run(self) -> Layout:
        """Try the optimizer; all ranks call this together.

        Returns:
            What tells the states that the optimizer makes, and how ranks divide them.

        Raises:
            ConfigError: The optimizer would train another model than in one process, could not go
                on from a checkpoint, or needs what a step does not give it.
        """
        try:
            with self._untouched():
                self._make(self._all, None)
        except Exception as error:  # such as rules for sizes
            self._unknown(error)
            return self.layout
        try:
            whole = self._steps(self._all)
        except ConfigError:
            raise
        except Exception as error:
            self._explain(error)
            return self.layout
        self._note(whole)
        noise = self._steps(self._all, seed=1)
        self._check_resumed(whole, noise)
        if self._model.mesh.degrees.pp > 1 or any(self._places):
            self._check_divided(whole, noise)
        return self.layout

    def _represented(self) -> tuple[dict[str, str], list[_Small], list[Place | None]]:
        """Return which small tensor each parameter has, by name, these tensors and their places."""
        model, by_name = self._model, takes_names(self._config._target_)
        plain, first = Setting(), dict[Any, str]()
        names: dict[str, str] = {}
        own: list[_Small] = []
        places: list[Place | None] = []
        for name, p in zip(model.names, model.parameters, strict=True):
            place = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            kind = re.sub(r"\d+", "#", name) if by_name else ""
            key = (kind, p.ndim, p.dtype, p.device, place, model.settings.get(name, plain))
            if key not in first:
                first[key] = name
                parts = _parts(p)
                dtype = p.dtype if p.dtype in (torch.float64, torch.complex64) else torch.float32
                shape = tuple((4 if dim == 0 else 3) * n for dim, n in enumerate(parts))
                text = str(dtype).removeprefix("torch.")
                own.append(_Small(name, shape, parts, text, p.device.type, model.mesh.pp_rank))
                places.append(place)
            names[name] = first[key]
        return names, own, places

    def _make(self, small: list[_Small], places: list[Place | None] | None) -> _Trained:
        """Return an optimizer of small tensors: whole ones, or divided as the model is."""

        def tensors(step: int) -> list[torch.Tensor]:
            here = places or [None] * len(small)
            return [
                _placed(each.values(step).to(each.device), place)
                for each, place in zip(small, here, strict=True)
            ]

        names = [each.name for each in small]
        parameters = [nn.Parameter(value) for value in tensors(0)]
        optimizer = optimizer_of(self._config, names, parameters, self._model.settings)
        return _Trained(optimizer, names, parameters, tensors, self._config.lr)

    def _steps(
        self, small: list[_Small], places: list[Place | None] | None = None, seed: int = 0
    ) -> _Ended:
        with self._untouched(seed):
            trained = self._make(small, places)
            trained.modes.train()
            for step in range(_STEPS):
                trained.step(step)
            return trained.ended()

    def _resumed(self) -> _Ended:
        """Return where the steps end if another optimizer goes on from a saved state."""
        with self._untouched():
            before = self._make(self._all, None)
            before.modes.train()
            for step in range(_SAVED):
                before.step(step)
            drawn = torch.get_rng_state()
            with before.modes.evaluating():
                saved, training = copy.deepcopy(before.state.flat()), before.modes.training
                weights = [p.detach().clone() for p in before.parameters]
        with self._untouched():
            after = self._make(self._all, None)
            for parameter, value in zip(after.parameters, weights, strict=True):
                parameter.data.copy_(value)
            after.state.load(saved)
            after.modes.restore(training)
            torch.set_rng_state(drawn)
            for step in range(_SAVED, _STEPS):
                after.step(step)
            return after.ended()

    def _check_resumed(self, whole: _Ended, noise: _Ended) -> None:
        """Refuse an optimizer that keeps something where a checkpoint does not find it."""
        why = ""
        try:
            found = self._resumed()
        except ConfigError:
            raise
        except Exception as error:
            why = f"it ends with {_said(error)}"
        else:
            difference = self._difference(found.weights, whole.weights, whole, noise)
            if difference > _SAID:
                why = f"its next steps are others, by {difference:.0%} of what they change"
            elif other := _unequal(found.numbers, whole.numbers, noise.numbers):
                why = f"param_groups[...]['{other}'] is another number"
        if why:
            raise ConfigError(
                f"{self._target}: when it goes on from a checkpoint, {why}. A checkpoint has "
                "state_dict() of the optimizer, which by default is state[parameter] and "
                "param_groups. An attribute, or another optimizer within it, would be lost: keep "
                "what it needs in these two"
            )

    def _check_divided(self, whole: _Ended, noise: _Ended) -> None:
        """Compare the steps on divided tensors with those on whole ones, over all ranks."""
        stages = [small.stage for small in self._all]
        first, count = stages.index(self._own[0].stage), len(self._own)
        pairs = (whole.weights[first:][:count], whole.weights[len(stages) + first :][:count])
        error, number, difference = "", "", 0.0
        try:
            divided = self._steps(self._own, self._places)
            self._note(divided)
            mine = [_local(_placed(w, p)) for part in pairs for w, p in self._with_places(part)]
            theirs = [_local(value) for value in divided.weights]
            difference = self._difference(theirs, mine, whole, noise)
            number = _unequal(divided.numbers, whole.numbers, noise.numbers)
        except Exception as raised:
            error = _said(raised)
        ranks = objects.all_gather((error, number, difference))
        error, number = (next((r[i] for r in ranks if r[i]), "") for i in (0, 1))
        difference = max(rank[2] for rank in ranks)
        how = ", ".join(f"{name}={size}" for name, size in self._model.layout.items())
        if error:
            raise ConfigError(
                f"{self._target} does not work where ranks divide the model ({how}): it ends with "
                f"{error}; {_CURE}"
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
                "%s: where ranks divide the model (%s), its steps on small tensors differ by %.2g%% "
                "from those of one process, by rounding: the runs will not be quite equal",
                *(self._target, how, 100 * difference),
            )

    def _with_places(self, values: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
        return zip(values, self._places, strict=True)

    def _difference(
        self, found: list[torch.Tensor], expected: list[torch.Tensor], whole: _Ended, noise: _Ended
    ) -> float:
        """Return the largest difference, relative to the largest change by the steps.

        An optimizer that draws random numbers, as for stochastic rounding, may differ by so much as
        it differs from itself with another seed.
        """
        begin = [small.values(0) for small in self._all]
        largest = max(float(value.abs().max()) for value in begin)
        change = _worst([w.cpu() for w in whole.weights[: len(begin)]], begin)
        own = 4 * _worst(noise.weights, whole.weights)
        worst = _worst(found, expected) - own - _ROUNDING * largest
        return max(worst, 0.0) / max(change, _ROUNDING)

    def _note(self, ended: _Ended) -> None:
        """Keep which states the optimizer has made, and how ranks divide them."""
        for small in self._own:
            start = f"state.{small.name}."
            self._state[small.name] = {
                key.removeprefix(start): (v.device_mesh, v.placements)
                if isinstance(v, DTensor)
                else None
                for key, v in ended.state.items()
                if key.startswith(start)
            }

    @property
    def _target(self) -> str:
        return f"optimizer._target_={self._config._target_}"

    def _unknown(self, error: Exception) -> None:
        if dist.get_rank() == 0:
            log.warning(
                "%s could not be tried on small tensors (%s). So it is not known whether it trains "
                "the same in every layout and after a resume",
                *(self._target, _said(error)),
            )

    def _explain(self, error: Exception) -> None:
        """Say why the optimizer has failed on small tensors, if its steps would fail, too."""
        if self._works_with_closure():
            raise ConfigError(
                f"{self._target} needs a closure that computes the loss again within a step, and a step "
                "of hpctrain is one forward and backward pass (docs/scope.md): use an optimizer "
                "whose step() works by itself, such as optimizer=adamw"
            ) from error
        if "sparse" in str(error):
            raise ConfigError(
                f"{self._target} needs sparse gradients, and the gradients here are dense, because ranks "
                "add them and they are clipped and judged: use optimizer=adamw"
            ) from error
        self._unknown(error)

    def _works_with_closure(self) -> bool:
        with suppress(Exception), self._untouched():
            trained = self._make(self._all, None)
            trained.modes.train()
            trained.step(0, closure=True)
            return True
        return False

    @contextmanager
    def _untouched(self, seed: int = 0) -> Iterator[None]:
        """Restore the random states, torch's hooks and what the optimizer's classes hold."""
        device = self._model.mesh.device
        within = [v for v in vars(self._optimizer).values() if isinstance(v, torch.optim.Optimizer)]
        kinds = {kind for each in (self._optimizer, *within) for kind in type(each).__mro__}
        kinds -= {*torch.optim.Optimizer.__mro__}
        hooks = (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        before = [dict(each) for each in hooks]
        python, numpy = random.getstate(), np.random.get_state()
        held = {kind: {n: (v, _content(v)) for n, v in vars(kind).items()} for kind in kinds}
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            for each in hooks:
                each.clear()
            try:
                yield
            finally:
                for each, content in zip(hooks, before, strict=True):
                    each.update(content)
                random.setstate(python)
                np.random.set_state(numpy)
                for kind, attributes in held.items():
                    _restore(kind, attributes)


class _Trained:
    """Small tensors and their optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        parameters: list[nn.Parameter],
        tensors: Callable[[int], list[torch.Tensor]],
        lr: float,
    ) -> None:
        self.optimizer, self.parameters, self._tensors = optimizer, parameters, tensors
        self._ratios = rate_ratios(optimizer, lr)
        self.state = OptimizerState(optimizer, names, parameters)
        self.modes = OptimizerModes(optimizer, names, parameters, lambda: None)

    def step(self, number: int, *, closure: bool = False) -> None:
        for parameter, gradient in zip(self.parameters, self._tensors(number + 1), strict=True):
            parameter.grad = gradient
        set_rates(self.optimizer, _LR, self._ratios)
        if closure:
            self.optimizer.step(lambda: torch.ones(()))
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def ended(self) -> _Ended:
        weights = [p.detach().clone() for p in self.parameters]
        with self.modes.evaluating():
            weights += [p.detach().clone() for p in self.parameters]
            return _Ended(weights, self.state.numbers(every=True), self.state.flat())


def _content(value: Any) -> Any:
    """Return a copy of a container; None for anything else."""
    return copy.deepcopy(value) if isinstance(value, dict | list | set) else None


def _restore(kind: type, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a class the attributes that it had, with their contents."""
    for name in [*vars(kind)]:
        if name not in attributes:
            delattr(kind, name)
    for name, (value, content) in attributes.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
        if content is not None and value != content:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


def _parts(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return for each dimension into how many parts ranks divide it."""
    parts = [1] * parameter.ndim
    if isinstance(parameter, DTensor):
        for size, place in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if (dim := getattr(place, "dim", None)) is not None:
                parts[dim] *= size
    return tuple(parts)


def _placed(value: torch.Tensor, place: Place | None) -> torch.Tensor:
    """Return a whole tensor divided over the ranks, on its device."""
    if place is None:
        return value
    divided: torch.Tensor = distribute_tensor(value, *place, src_data_rank=None)
    return divided.to(value.device)  # that of the mesh may be another, if parameters are offloaded


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of tensors; infinite if one is not a number alone."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().masked_fill(same, 0).max()
        worst = max(worst, float("inf") if apart.isnan() else float(apart))
    return worst


def _unequal(
    found: Mapping[str, float], expected: Mapping[str, float], other: Mapping[str, float]
) -> str:
    """Return the key of a number that is not as expected; "" if all are.

    `other` has those of another seed: an optimizer may draw a number.
    """
    for name, value in found.items():
        known, drawn = expected.get(name, value), other.get(name, value)
        if math.isclose(value, known, rel_tol=_SAID, abs_tol=4 * abs(drawn - known)):
            continue
        if not (math.isnan(value) and math.isnan(known)):
            return name.rpartition(".")[2]
    return ""


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
