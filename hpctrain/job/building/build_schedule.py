"""Builds the learning rate over the steps, also from a function or a torch scheduler of a user.

optimizer.lr, lr_scaling ──┐
scheduler.warmup_*         ├── Effective ─┬─ one log line, and params `effective.*` in MLflow
train.*, steps per epoch ──┘              └─ Schedule
"""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.config.rules.batch_sizes import BatchSizes, ramp_of
from hpctrain.config.schema import Config, SchedulerConfig
from hpctrain.errors import ConfigError
from hpctrain.job.building.instantiate import instantiate
from hpctrain.training.schedule import Schedule, peak_lr, warmup_steps


@dataclass(frozen=True)
class Effective:
    """What a run really uses: what follows from the config together with the data and ranks."""

    lr: float  # the learning rate after warm-up
    warmup_steps: int  # the steps of the warm-up
    max_steps: int  # the global step at which the run ends
    steps_per_epoch: int  # the steps of an epoch, after the ramp
    global_batch_size: int  # the samples of a step over all ranks, after the ramp
    dp: int  # the shares into which they are divided; a rank of weight 2 has two of them
    accumulate: int  # the micro-batches of a share
    ramp_steps: int = 0  # the steps of the ramp, whose batches are smaller

    @classmethod
    def of(
        cls,
        config: Config,
        batch: BatchSizes,
        steps_per_epoch: int,
        steps_in: Callable[[int], int],
    ) -> Effective:
        """Return the values for this batch, whose sizes are those after the ramp.

        `steps_in` returns the steps of the first epochs, with those of the ramp.
        """
        train, ramp = config.train, ramp_of(config.train)
        limits: list[float] = [math.inf if train.max_steps is None else train.max_steps]
        if train.max_epochs is not None:
            limits.append(steps_in(train.max_epochs))
        return cls(
            lr=peak_lr(config.optimizer, batch.global_size),
            warmup_steps=warmup_steps(config.scheduler, ramp, steps_per_epoch),
            max_steps=int(min(limits)),
            steps_per_epoch=steps_per_epoch,
            global_batch_size=batch.global_size,
            dp=batch.shares,
            accumulate=batch.accumulate,
            ramp_steps=sum(steps for _, steps in ramp.stages),
        )

    def __str__(self) -> str:
        micro_batch = self.global_batch_size // (self.dp * self.accumulate)
        return (
            f"peak lr {self.lr:g}, warm-up {self.warmup_steps} of {self.max_steps} steps"
            f"{' (the run ends before the peak)' * (self.warmup_steps > self.max_steps)}, "
            f"{self.steps_per_epoch} steps per epoch, global batch {self.global_batch_size} = "
            f"dp {self.dp} x accumulate {self.accumulate} x {micro_batch} samples"
            + (f" after a ramp of {self.ramp_steps} steps" if self.ramp_steps else "")
        )


def build_schedule(config: SchedulerConfig, effective: Effective) -> Schedule:
    """Return the schedule of a run."""
    own = None if config._target_ is None else _own(config, config._target_, effective.max_steps)
    return Schedule(effective.lr, config, effective.max_steps, effective.warmup_steps, own)


def _own(config: SchedulerConfig, target: str, max_steps: int) -> Callable[[int], float]:
    made: Callable[..., Any] = instantiate(
        "scheduler", {"_target_": target, "_partial_": True, **config.options}
    )
    try:
        names = list(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # some compiled functions have no signature
        names = []
    if "max_steps" in names and "max_steps" not in config.options:
        made = partial(made, max_steps=max_steps)
    if "total_steps" in names and not {"total_steps", "epochs"} & config.options.keys():
        made = partial(made, total_steps=max_steps)  # the same, as OneCycleLR calls it
    try:
        if names[:1] == ["optimizer"]:
            return _Stepped(made, target, max_steps)
        function: Callable[[int], float] = made
        function(0)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{error}".split())
        name = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"scheduler._target_={target}: {name}{reason}") from error
    return function


class _Stepped:
    """A torch scheduler as a function of the step: one for an optimizer whose rate is 1."""

    def __init__(
        self, make_scheduler: Callable[[torch.optim.Optimizer], Any], target: str, max_steps: int
    ) -> None:
        self._target = target
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self._others = self._besides()
        made = make_scheduler(self._optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise ValueError("it needs a metric: use scheduler.kind=plateau")
        if not isinstance(made, LRScheduler):
            kind = type(made).__name__
            raise ValueError(f"with an optimizer it must make a scheduler of torch, not a {kind}")
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        given = inspect.signature(made.step).parameters.values()
        needed = [p.name for p in given if p.default is p.empty and p.kind not in kinds]
        if needed:
            raise ValueError(
                f"its step() needs {', '.join(needed)}, and a schedule here gets the step alone"
            )
        if (length := getattr(made, "total_steps", None) or max_steps) < max_steps:
            raise ValueError(f"it has {length} steps, and the run has {max_steps}")
        self._scheduler = made
        self._check()
        self._factors = array("d", [self._optimizer.param_groups[0]["lr"]])

    def __call__(self, step: int) -> float:
        while len(self._factors) <= step:
            self._optimizer.step()  # else torch warns; without a gradient it does nothing
            try:
                self._scheduler.step()
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                number = len(self._factors)
                raise ConfigError(
                    f"scheduler._target_={self._target}: at step {number}: {reason}"
                ) from error
            self._check()
            self._factors.append(float(self._optimizer.param_groups[0]["lr"]))
        return float(self._factors[step])

    def _besides(self) -> dict[str, Any]:
        group = self._optimizer.param_groups[0]
        return {key: group[key] for key in self._optimizer.defaults if key != "lr"}

    def _check(self) -> None:
        """Refuse a scheduler that changes more than the learning rate, which would be lost."""
        now = self._besides()
        changed = [key for key, value in self._others.items() if now[key] != value]
        if changed:
            cure = ""
            if "momentum" in changed and hasattr(self._scheduler, "cycle_momentum"):
                cure = ": give ++scheduler.options.cycle_momentum=false"
            raise ConfigError(
                f"scheduler._target_={self._target}: it also changes {changed[0]} of the "
                f"optimizer, and a schedule here is a factor of the learning rate alone{cure}"
            )
