"""The learning rate as a function of the step, also one of a user.

optimizer.lr, lr_scaling ── peak_lr ───────┐
scheduler.warmup_* ──────── warmup_steps ──┼── Effective ─┬─ one log line, and params `effective.*`
train.*, steps per epoch ──────────────────┘              └─ Schedule(step)

Resuming needs no state of it, but for kind=plateau, which follows a metric.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.batch_sizes import BatchSizeRamp, BatchSizes, ramp_of
from hpctrain.config.schema import OptimizerConfig, SchedulerConfig, TrainConfig
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.part import Part
from hpctrain.engine.parts.improvement import Improvement

# As torch's OneCycleLR: the part of the steps in which the rate rises, and where it begins.
_RISE, _BEGIN = 0.3, 0.04


class Schedule(Part):
    """Linear warm-up to `lr`, then what `scheduler.kind` or a function of the user says.

    The kinds are constant, linear, cosine (Loshchilov & Hutter 2017), wsd (warm-up, stable, decay:
    Hu et al. 2024, "MiniCPM"), one_cycle (Smith & Topin 2018, with cosines and the defaults of
    torch's OneCycleLR, whose momentum is left alone) and plateau. `lr` is the
    peak, and the decay ends at `max_steps`. The function of the user, `scheduler._target_`, returns
    the factor of `lr` at a step, in place of the kind.
    """

    name = "schedule"

    def __init__(self, lr: float, config: SchedulerConfig, max_steps: int, warmup: int = 0) -> None:
        self.lr, self.config, self.max_steps, self.warmup = lr, config, max_steps, warmup
        own = None if config._target_ is None else _own(config, config._target_, max_steps)
        self._own, self._lowered = own, 1.0
        follows = config.plateau
        metric = follows.metric if config.kind == "plateau" and own is None else None
        self._plateau = Improvement(metric, patience=follows.patience)

    def __call__(self, step: int) -> float:
        """Return the learning rate of global step `step`, counted from 0.

        Raises a ConfigError if the user's function returns no number, or a negative one.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup * self._lowered
        if self._own is not None:
            return self.lr * self._factor(step)
        if self.config.kind in ("constant", "plateau"):
            return self.lr * self._lowered
        if self.config.kind == "one_cycle":
            return self.lr * self._one_cycle(step)
        begin, length = self.warmup, max(1, self.max_steps - self.warmup)
        if self.config.kind == "wsd":
            length = max(1, round(self.config.decay_fraction * self.max_steps))
            begin = self.max_steps - length
        progress = min(1.0, max(0.0, (step - begin) / length))
        if self.config.kind == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.lr * (1 - (1 - self.config.final_ratio) * progress)

    def logged(self, metrics: Mapping[str, float], step: int) -> None:
        """Lower the learning rate if the metric of kind=plateau has not become better.

        All ranks call this with the same metrics, those that are new at this step.
        """
        self._plateau.judge(metrics, step)
        if self._plateau.is_over:
            lowered = self._lowered * self.config.plateau.factor
            self._lowered = max(lowered, self.config.final_ratio)
            self._plateau.since = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of kind=plateau, as JSON."""
        return {"lowered": self._lowered, "plateau": self._plateau.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._lowered = state["lowered"]
        self._plateau.load_state_dict(state["plateau"])

    def _one_cycle(self, step: int) -> float:
        """Return the factor of a step; the last step before `max_steps` has the final one."""
        last = self.max_steps - 1
        top = _RISE * self.max_steps - 1
        if step <= top:
            low, high, progress = _BEGIN, 1.0, step / max(top, 1e-9)
        else:
            low, high = 1.0, self.config.final_ratio
            progress = min(1.0, (step - top) / max(last - top, 1e-9))
        return high + (low - high) * (1 + math.cos(math.pi * progress)) / 2

    def _factor(self, step: int) -> float:
        assert self._own is not None
        factor = self._own(step)
        try:
            value = float(factor)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"scheduler._target_={self.config._target_}: it returns {factor!r} for step "
                f"{step}; it must be a number, at least 0"
            )
        return value


def rate_ratios(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """Return each parameter group's own learning rate, divided by that of the config.

    This is known before a checkpoint is loaded, since that has the rates of its last step. A group
    without a rate has that of the config.
    """
    return [float(group.get("lr", lr)) / lr for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, lr: float, ratios: Sequence[float]) -> None:
    """Give each parameter group its rate, `lr` times its ratio; tensors stay the same tensors."""
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(lr * ratio)
        else:
            group["lr"] = lr * ratio


def peak_lr(config: OptimizerConfig, batch: int) -> float:
    """Return the learning rate after warm-up for a global batch size.

    It grows with the batch linearly (Goyal et al. 2017, "Accurate, Large Minibatch SGD") or with
    its square root, which keeps the variance of the gradient's noise (Krizhevsky 2014, "One Weird
    Trick for Parallelizing Convolutional Neural Networks").
    """
    if config.lr_scaling == "none" or config.base_batch_size is None:
        return config.lr
    ratio = batch / config.base_batch_size
    return config.lr * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def warmup_steps(config: SchedulerConfig, ramp: BatchSizeRamp, steps_per_epoch: int) -> int:
    """Return the steps of the warm-up, of which at most one length is set.

    `steps_per_epoch` are those after the ramp.
    """
    if config.warmup_epochs:
        # 0.1 epochs of 30 steps are 3 steps, although 0.1 * 30 is a little more.
        return ramp.steps(ramp.final * max(1, round(config.warmup_epochs * steps_per_epoch)))
    return config.warmup_steps


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


def _own(config: SchedulerConfig, target: str, max_steps: int) -> Callable[[int], float]:
    """Return the schedule of the user."""
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
