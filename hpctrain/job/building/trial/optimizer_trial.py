"""A trial of the optimizer on small tensors, before the first step of a training.

    small tensors, whole ──────── 4 steps ──┬── the same numbers? ── else ddp is the cure
    small tensors, divided ────── 4 steps ──┘   as the ranks divide the model
    small tensors ── 2 steps ── saved, loaded ── 2 steps ── the same as 4 steps?

An optimizer that takes a norm or a sum over a parameter gets the one of a rank's part where ranks
divide it: `DTensor.norm().item()` is that in torch, without a word. And what an optimizer keeps
outside of its state is lost when a run is resumed.

The trial makes optimizers of its own and leaves nothing behind.
"""

import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as registry

from hpctrain.checkpoint.optimizer_state import Layout, Place
from hpctrain.config.rules.parameter_rules import NEEDS_CLOSURE, NEEDS_SPARSE
from hpctrain.config.schema import OptimizerConfig
from hpctrain.distributed import objects
from hpctrain.distributed.tensors import local
from hpctrain.errors import ConfigError
from hpctrain.generators import seed_generators
from hpctrain.job.building.build_optimizer import optimizer_of, takes_names
from hpctrain.job.building.trial.small_training import (
    STEPS,
    Ended,
    SmallTensor,
    SmallTensors,
    SmallTraining,
    UnmadeError,
    difference,
    first_sentence,
    placed,
    worst,
)
from hpctrain.models.dry_run import dry_run
from hpctrain.parallel.wrappers.parallel_model import ParallelModel

log = logging.getLogger(__name__)

_SAVED = STEPS // 2
_SAID, _REFUSED = 1e-3, 0.1  # of what the steps change; Muon in bf16 differs by up to 0.02
# These compute each element by itself and keep all in their state, as our tests show. torch cannot
# divide some that are fused.
_KNOWN = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
_CURE = "use parallel=ddp, or an optimizer that computes each element by itself (optimizer=adamw)"


class OptimizerTrial:
    """Tries the optimizer of a model, and leaves it as it is; see the module."""

    def __init__(
        self, config: OptimizerConfig, model: ParallelModel, optimizer: torch.optim.Optimizer
    ) -> None:
        self._config, self._model, self._untouched = config, model, partial(_untouched, optimizer)
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
            whole = self._steps()
            self._note(whole)
            self._check_resumed(whole)
            if self._model.mesh.degrees.pp > 1 or any(s.place for s in self._small.own):
                self._check_divided(whole)
        except UnmadeError as error:
            if dist.get_rank() == 0:
                log.warning(
                    "%s could not be tried on small tensors (%s). So it is not known whether it "
                    "trains the same in every layout and after a resume",
                    *(self._target, error),
                )
        return lambda name: self._state.get(self._small.of.get(name, ""))

    def _training(self, small: Sequence[SmallTensor], *, divided: bool = False) -> SmallTraining:
        def make(names: list[str], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return optimizer_of(self._config, names, parameters, self._model.settings)

        return SmallTraining(make, self._config.lr, small, divided=divided)

    def _steps(self, *, divided: bool = False, seed: int = 0) -> Ended:
        """Return where the steps end, with whole tensors or with divided ones."""
        small = self._small.own if divided else self._small.every
        with self._untouched(seed):
            training = self._training(small, divided=divided)
            try:
                for step in range(STEPS):
                    training.step(step)
            except Exception as error:
                if divided:
                    raise
                self._explain(error)
                raise UnmadeError(first_sentence(error)) from error
            return training.ended()

    def _resumed(self) -> Ended:
        """Return where the steps end if another optimizer goes on from a saved state."""
        with self._untouched(0):
            before = self._training(self._small.every)
            for step in range(_SAVED):
                before.step(step)
            drawn = torch.get_rng_state()
            with before.modes.evaluating():
                saved, training = copy.deepcopy(before.state.flat()), before.modes.training
                weights = before.weights()
        with self._untouched(0):
            after = self._training(self._small.every)
            for parameter, value in zip(after.parameters, weights, strict=True):
                parameter.data.copy_(value)
            after.state.load(saved)
            after.modes.restore(training)
            torch.set_rng_state(drawn)
            for step in range(_SAVED, STEPS):
                after.step(step)
            return after.ended()

    def _check_resumed(self, whole: Ended) -> None:
        """Refuse an optimizer that keeps something where a checkpoint does not find it."""
        try:
            why = self._unlike(self._resumed(), whole)
        except (UnmadeError, ConfigError):
            raise
        except Exception as error:
            why = f"it ends with {first_sentence(error)}"
        if why:
            raise ConfigError(
                f"{self._target}: when it goes on from a checkpoint, {why}. A checkpoint has "
                "state_dict() of the optimizer, which by default is state[parameter] and "
                "param_groups. An attribute, or another optimizer within it, would be lost: keep "
                "what it needs in these two"
            )

    def _unlike(self, found: Ended, whole: Ended) -> str:
        """Return how a resumed trial differs from the other; "" if it does not."""
        if not (worst(found.weights, whole.weights) or found.unequal_number(whole, whole, _SAID)):
            return ""
        noise = self._steps(seed=1)
        apart = difference(self._small.every, found.weights, whole.weights, whole, noise)
        if apart > _SAID:
            return f"its next steps are others, by {apart:.0%} of what they change"
        number = found.unequal_number(whole, noise, _SAID)
        return f"param_groups[...]['{number}'] is another number" if number else ""

    def _check_divided(self, whole: Ended) -> None:
        """Compare the steps on divided tensors with those on whole ones, over all ranks."""
        noise = self._steps(seed=1)  # on all ranks: it may communicate
        error, number, apart = "", "", 0.0
        try:
            divided = self._steps(divided=True)
            self._note(divided)
            theirs = [local(value) for value in divided.weights]
            names = [small.name for small in self._small.every]
            places = {small.name: small.place for small in self._small.own}
            pairs = zip([*names, *names], whole.weights, strict=True)  # as trained, as evaluated
            ours = [local(placed(value, places[name])) for name, value in pairs if name in places]
            apart = difference(self._small.every, theirs, ours, whole, noise)
            number = divided.unequal_number(whole, noise, _SAID)
        except UnmadeError:
            raise
        except Exception as raised:
            error = first_sentence(raised)
        ranks = objects.all_gather((error, number, apart))
        error, number = (next((rank[i] for rank in ranks if rank[i]), "") for i in (0, 1))
        apart = max(rank[2] for rank in ranks)
        how = ", ".join(f"{name}={size}" for name, size in self._model.layout.items())
        if error:
            raise ConfigError(
                f"{self._target} does not work where ranks divide the model ({how}): {error}; "
                + ("give ++optimizer.options.fused=false, or " if "_fused_" in error else "")
                + _CURE
            )
        if number or apart > _REFUSED:
            what = f"param_groups[...]['{number}'] is another number than in one process"
            if not number:
                what = f"its steps on small tensors differ by {apart:.0%} from one process"
            raise ConfigError(
                f"{self._target}: where ranks divide the model ({how}), {what}. It takes a norm or "
                "a sum over a whole parameter or the whole model, and gets that of a rank's part; "
                f"{_CURE}"
            )
        if apart > _SAID and dist.get_rank() == 0:
            log.warning(
                "%s: where ranks divide the model (%s), its steps on small tensors differ by "
                "%.1f%% from those of one process, by rounding: the runs will not be quite equal",
                *(self._target, how, 100 * apart),
            )

    def _note(self, ended: Ended) -> None:
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
        works = False
        with suppress(Exception), self._untouched(0):
            self._training(self._small.every).step(0, closure=True)
            works = True
        if works:
            raise ConfigError(f"{self._target} {NEEDS_CLOSURE}") from error
        if "sparse" in str(error).lower():
            raise ConfigError(f"{self._target} {NEEDS_SPARSE}") from error


@contextmanager
def _untouched(optimizer: torch.optim.Optimizer, seed: int) -> Iterator[None]:
    """Begin with these random seeds, and put back all that others could see."""
    within = [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)]
    kinds = {kind for each in (optimizer, *within) for kind in type(each).__mro__}
    held = {  # what these classes count or list, with copies of containers
        kind: {
            name: (value, copy.deepcopy(value) if isinstance(value, dict | list | set) else None)
            for name, value in vars(kind).items()
        }
        for kind in kinds - {*torch.optim.Optimizer.__mro__}
    }
    hooks: tuple[dict[Any, Any], ...] = (
        registry._global_optimizer_pre_hooks,
        registry._global_optimizer_post_hooks,
    )
    before = [dict(each) for each in hooks]
    printed = redirect_stdout(io.StringIO())
    with dry_run(), warnings.catch_warnings(), printed:
        warnings.simplefilter("ignore")
        seed_generators(seed)
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, content in zip(hooks, before, strict=True):
                each.clear()
                each.update(content)
            for kind, attributes in held.items():
                _restore(kind, attributes)


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
