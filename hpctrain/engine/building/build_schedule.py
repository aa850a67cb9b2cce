"""Builds the learning rate over the steps, also from a function of a user.

optimizer.lr, lr_scaling ──┐
scheduler.warmup_*         ├── Effective ─┬─ one log line, and params `effective.*` in MLflow
train.*, steps per epoch ──┘              └─ Schedule
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.config.rules.batch_sizes import BatchSizes, ramp_of
from hpctrain.config.schema import OptimizerConfig, SchedulerConfig, TrainConfig
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.supervised.schedule import Schedule, peak_lr, warmup_steps
from hpctrain.errors import ConfigError


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
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        train: TrainConfig,
        batch: BatchSizes,
        steps_per_epoch: int,
        steps_in: Callable[[int], int],
    ) -> Effective:
        """Return the values for this batch, whose sizes are those after the ramp.

        `steps_in` returns the steps of the first epochs, with those of the ramp.
        """
        limits: list[float] = [math.inf if train.max_steps is None else train.max_steps]
        if train.max_epochs is not None:
            limits.append(steps_in(train.max_epochs))
        ramp = ramp_of(train)
        return cls(
            lr=peak_lr(optimizer, batch.global_size),
            warmup_steps=warmup_steps(scheduler, ramp, steps_per_epoch),
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
    if names[:1] == ["optimizer"]:
        raise ConfigError(
            f"scheduler._target_={target}: a schedule is a function of the step, and this one "
            "wants an optimizer, as torch's schedulers do: use a kind of ours (scheduler=cosine, "
            "wsd, one_cycle, plateau), or a function of yours that returns the factor of a step"
        )
    try:
        made(0)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{error}".split())
        name = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"scheduler._target_={target}: {name}{reason}") from error
    return made
