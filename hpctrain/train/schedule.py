"""The learning rate as a pure function of the step: resuming needs no state of it."""

from __future__ import annotations

import math

from hpctrain.config.schema import SchedulerConfig


class Schedule:
    """Linear warm-up to `lr`, then constant, linear or cosine (Loshchilov & Hutter 2017) decay.

    Args:
        lr: Peak learning rate.
        config: Kind, warm-up steps and final ratio.
        max_steps: Global step at which the decay ends.
    """

    def __init__(self, lr: float, config: SchedulerConfig, max_steps: int) -> None:
        self.lr, self.config, self.max_steps = lr, config, max_steps

    def __call__(self, step: int) -> float:
        """Return the learning rate of global step `step`, counted from 0."""
        warmup, final = self.config.warmup_steps, self.config.final_ratio
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.config.kind == "constant":
            return self.lr
        progress = min(1.0, (step - warmup) / max(1, self.max_steps - warmup))
        if self.config.kind == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.lr * (1 - (1 - final) * progress)
