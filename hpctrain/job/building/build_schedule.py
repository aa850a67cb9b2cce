"""Builds the learning rate over the steps, also from a function or a torch scheduler of a user."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.config.schema import SchedulerConfig
from hpctrain.errors import ConfigError
from hpctrain.job.building.effective import Effective
from hpctrain.job.building.make import make
from hpctrain.training.schedule import Schedule


def build_schedule(config: SchedulerConfig, effective: Effective) -> Schedule:
    """Return the schedule of a run.

    Args:
        config: The section `scheduler`.
        effective: The peak learning rate, and the steps of the warm-up and of the run.

    Raises:
        ConfigError: `_target_` cannot be imported or refuses its arguments.
    """
    own = None if config._target_ is None else _own(config, config._target_, effective.max_steps)
    return Schedule(effective.lr, config, effective.max_steps, effective.warmup_steps, own)


def _own(config: SchedulerConfig, target: str, max_steps: int) -> Callable[[int], float]:
    made = make("scheduler", {"_target_": target, "_partial_": True, **config.options})
    try:
        names = list(inspect.signature(made.func).parameters)
    except (TypeError, ValueError):  # some compiled functions have no signature
        names = []
    if "max_steps" in names and "max_steps" not in config.options:
        made = partial(made, max_steps=max_steps)
    try:
        function: Callable[[int], float] = _Stepped(made) if names[:1] == ["optimizer"] else made
        function(0)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler._target_={target}: {error}") from error
    return function


class _Stepped:
    """A torch scheduler as a function of the step: one for an optimizer whose rate is 1 is stepped.

    It is deterministic, so a resumed run steps it to where it was, at about 10 us a step.
    """

    def __init__(self, make_scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        made = make_scheduler(self._optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise ValueError("it needs a metric: use scheduler.kind=plateau")
        if not isinstance(made, LRScheduler):
            kind = type(made).__name__
            raise ValueError(f"with an optimizer it must make a scheduler of torch, not a {kind}")
        self._scheduler = made
        self._factors = array("d", [self._optimizer.param_groups[0]["lr"]])

    def __call__(self, step: int) -> float:
        while len(self._factors) <= step:
            self._optimizer.step()  # else torch warns; without a gradient it does nothing
            self._scheduler.step()
            self._factors.append(float(self._optimizer.param_groups[0]["lr"]))
        return float(self._factors[step])
