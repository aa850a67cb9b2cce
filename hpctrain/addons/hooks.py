"""Hooks: a user's own code at four places of the training loop.

hooks:
  - {_target_: my_hooks.DrawPrediction, every: 100}

step ── after_step ── before_evaluation ── evaluation ── after_evaluation ── save ── after_save
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.types import Batch
from hpctrain.engine.checkpoint.saved_state import plain_name
from hpctrain.engine.part import Part
from hpctrain.engine.tasks.task import Task
from hpctrain.tracking.tracker import Tracker


@dataclass(frozen=True)
class RunState:
    """What a hook sees of a run; every rank has its own.

    Attributes:
        step: The global step, counted from 1 after the first step.
        model: The model as this rank has it: wrapped, divided or sharded, as the layout says. After
            a step its gradients are gone.
        optimizer: The optimizer of this rank's parameters.
        task: The task, which computes sums and counts from the model and a batch.
        batch: After a step, this rank's batch, whose tensors are on the device; else None.
        metrics: The last value of every metric, the same on all ranks.
        tracker: Records metrics, figures and images. Only that of rank 0 writes something.
    """

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    batch: Batch | None
    metrics: Mapping[str, float]
    tracker: Tracker


class Hook:
    """The base class of a hook: override the methods that you need.

    All ranks call the same methods at the same steps, so a method may use collective operations. An
    exception ends the run as failed. A run that was stopped may repeat an evaluation, and then its
    two methods are called again.
    """

    def after_step(self, state: RunState) -> None:
        """Do something after each step; it costs the time of the training."""

    def before_evaluation(self, state: RunState) -> None:
        """Do something before an evaluation; the random state is restored after it."""

    def after_evaluation(self, state: RunState) -> None:
        """Do something with the results of an evaluation, which `state.metrics` has."""

    def after_save(self, state: RunState, folder: Path) -> None:
        """Do something with a checkpoint that is complete on the disk.

        Args:
            state: The step and the metrics are those of the checkpoint. The model may have made
                steps since, while the checkpoint was written.
            folder: The folder of the checkpoint. Later saves remove it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs to go on after a resume, as JSON; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


def _trained(model: nn.Module) -> set[str]:
    return {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}


class Hooks(Part):
    """The part that calls the hooks of a run, in their order."""

    name = "hooks"

    def __init__(
        self,
        hooks: Iterable[Hook],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        tracker: Tracker,
    ) -> None:
        self._hooks = list(hooks)
        self._trained, self._tracker = (model, optimizer, task), tracker
        self._held: set[str] | None = None  # the parameters that the optimizer has

    def _seen(self, batch: Batch | None) -> RunState:
        at = self.session
        return RunState(at.step, *self._trained, batch, at.metrics, self._tracker)

    def after_step(self, step: int, batch: Batch) -> None:  # noqa: D102
        state = self._seen(batch)
        self._call(state, lambda hook: hook.after_step(state))

    def before_evaluation(self) -> None:  # noqa: D102
        state = self._seen(None)
        self._call(state, lambda hook: hook.before_evaluation(state))

    def after_evaluation(self) -> None:  # noqa: D102
        state = self._seen(None)
        self._call(state, lambda hook: hook.after_evaluation(state))

    def after_save(self, step: int, metrics: Mapping[str, float], folder: Path) -> None:  # noqa: D102
        state = replace(self._seen(None), step=step, metrics=metrics)
        self._call(state, lambda hook: hook.after_save(state, folder))

    def _call(self, state: RunState, call: Callable[[Hook], None]) -> None:
        """Call each hook; one that unfreezes what the optimizer lacks would change nothing."""
        for hook in self._hooks:
            if self._held is None:
                self._held = _trained(state.model)
            call(hook)
            if lacks := sorted(_trained(state.model) - self._held):
                kind = type(hook)
                raise ConfigError(
                    f"hooks: {kind.__module__}.{kind.__qualname__} has unfrozen {few(lacks, 4)} at "
                    f"step {state.step}, which the optimizer lacks, so that it would not change: "
                    "it gets what is trained at the start of a run. Begin with it trained, at a "
                    f"rate of its own (optimizer.groups=[{{match: {lacks[0]}, lr_factor: 0.1}}], "
                    "and no freeze), or unfreeze it in a second run: checkpoint.init_from=RUN"
                )

    def state_dict(self) -> list[dict[str, Any]]:  # noqa: D102
        return [hook.state_dict() for hook in self._hooks]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:  # noqa: D102
        for hook, state in zip(self._hooks, states, strict=True):
            hook.load_state_dict(state)
