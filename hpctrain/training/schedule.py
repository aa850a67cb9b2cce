"""The learning rate as a pure function of the step: resuming needs no state of it.

optimizer.lr ── peak_lr ───────────┐
scheduler.warmup_* ── warmup_steps ┴── Schedule(step)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctrain.config.schema import OptimizerConfig, SchedulerConfig


class Schedule:
    """Linear warm-up to `lr`, then constant, linear or cosine (Loshchilov & Hutter 2017) decay.

    Args:
        lr: Peak learning rate.
        config: Kind and final ratio.
        max_steps: Global step at which the decay ends.
        warmup: Steps of the warm-up.
    """

    def __init__(self, lr: float, config: SchedulerConfig, max_steps: int, warmup: int = 0) -> None:
        self.lr, self.config, self.max_steps, self.warmup = lr, config, max_steps, warmup

    def __call__(self, step: int) -> float:
        """Return the learning rate of global step `step`, counted from 0."""
        warmup, final = self.warmup, self.config.final_ratio
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.config.kind == "constant":
            return self.lr
        progress = min(1.0, (step - warmup) / max(1, self.max_steps - warmup))
        if self.config.kind == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.lr * (1 - (1 - final) * progress)


def rate_ratios(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """Return each parameter group's own learning rate, divided by that of the config.

    This is known before a checkpoint is loaded, since that has the rates of its last step.

    Args:
        optimizer: As it was made. A group without a rate has that of the config.
        lr: The learning rate that the optimizer was made with.
    """
    return [float(group.get("lr", lr)) / lr for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, lr: float, ratios: Sequence[float]) -> None:
    """Give each parameter group its learning rate of a step.

    Args:
        optimizer: Rates that are tensors stay the same tensors.
        lr: The learning rate of the step.
        ratios: That of each group is `lr` times this.
    """
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


def warmup_steps(config: SchedulerConfig, batch: int, steps_per_epoch: int) -> int:
    """Return the steps of the warm-up; a part of a step of samples counts as one step.

    Args:
        config: At most one of its three lengths of the warm-up is set.
        batch: The global batch size.
        steps_per_epoch: The steps of an epoch.
    """
    if config.warmup_samples:
        return -(-config.warmup_samples // batch)
    if config.warmup_epochs:
        # 0.1 epochs of 30 steps are 3 steps, although 0.1 * 30 is a little more.
        return max(1, round(config.warmup_epochs * steps_per_epoch))
    return config.warmup_steps
