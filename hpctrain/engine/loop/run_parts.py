"""The objects that a run consists of, and how they are saved and loaded together.

    save ── copied, or written at once ── go on saving, in each step ── committed: tell the hooks

What a checkpoint has beside model and optimizer are the parts with a `state_dict`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.names.step_names import step_of
from hpctrain.base.processes import marks
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.shards.types import Batch
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.looking.first_look import NoLook
from hpctrain.engine.loop.schedule import Schedule
from hpctrain.engine.loop.step import TrainStep
from hpctrain.engine.parts.display import Display
from hpctrain.engine.parts.hooks import Hooks, RunState
from hpctrain.engine.parts.improvement import Best, Improvement
from hpctrain.engine.parts.meter import Meter
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.parts.watch import Watch
from hpctrain.engine.tasks.task import TaskState
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Every:
    """Steps from one log line, evaluation or checkpoint to the next."""

    log: int
    evaluate: int | None  # None: at each end of an epoch
    checkpoint: int | None  # None: not by steps
    at_end: bool = True  # whether the last step of the run saves a checkpoint


@dataclass
class RunParts:
    """The objects that a run consists of; `hpctrain.engine.building.build` makes them."""

    train_step: TrainStep
    schedule: Schedule
    loader: DevicePrefetcher
    checkpointer: Checkpointer
    tracker: Tracker
    display: Display
    stop: Stop
    device: torch.device
    max_steps: int
    every: Every
    meter: Meter
    # The feeds of the evaluation, by what the names of their metrics begin with, such as `val`.
    evaluations: Mapping[str, DevicePrefetcher] = field(default_factory=dict)
    asked: Sequence[RequestedMetric] = ()
    hooks: Hooks = field(default_factory=Hooks)
    patience: Improvement = field(default_factory=Improvement)
    best: Best = field(default_factory=Best)
    notes: Notes = field(default_factory=Notes)
    watch: Watch = field(default_factory=Watch)
    began_from: Callable[[int, Collection[int]], None] = lambda step, damaged: None
    look: NoLook = field(default_factory=NoLook)
    step: int = 0
    until: int | None = None  # the global step after which the training pauses
    evaluation_due: bool = False
    evaluated_at: int = -1  # the step of the last evaluation of this attempt
    metrics: dict[str, float] = field(default_factory=dict)

    def _resume(self) -> int:
        marks.enter(marks.LOAD)
        by_steps = (self.every.checkpoint or self.max_steps + 1) <= self.max_steps
        by_clock = self.train_step.save_timer.flags()
        if self.every.at_end or by_steps or by_clock or self.best.metric is not None:
            self.checkpointer.prove()
        began = time.monotonic()
        progress = self.checkpointer.load_latest()
        if progress is not None:
            self.step = self.train_step.model.step = progress["step"]
            self.metrics = progress["metrics"]
            self.evaluation_due = progress["evaluation_due"]
            self.train_step.totals.load_state_dict(progress["totals"], self.device)
            if not progress["ema"]:
                self.train_step.average.restart()
            for name, part in self._stateful.items():
                part.load_state_dict(progress.get(name, {}))  # older checkpoints lack some
            if dist.get_rank() == 0:
                known = self.step, time.monotonic() - began
                log.info("going on from the checkpoint of step %d (read in %.1f s)", *known)
        else:
            self.checkpointer.modes.train()
        self.began_from(self.step, {step_of(path) for path in self.checkpointer.committed.damaged})
        # After a rollback without a checkpoint the run starts at step 0 again.
        self.tracker.rewind(progress["tracker"] if progress is not None else 0)
        self.notes.begin(self.step)
        dist.barrier()
        return self.step

    def _save_is_due(self) -> bool:
        by_steps = self.every.checkpoint is not None and self.step % self.every.checkpoint == 0
        return by_steps or self.best.is_due(self.step) or self.train_step.save_timer.is_due()

    def _save(self, *, background: bool = False) -> None:
        self._go_on_saving(wait=True)
        with self.meter.spent("checkpoint"), self.display.doing("a checkpoint"):
            self.train_step.health.judge(late=False)
            self.tracker.sync()
            progress = self._progress()
            self.checkpointer.save(self.step, progress, self.best.step, background=background)
            self.train_step.health.judge_state(self.checkpointer.wrong)
            self.train_step.save_timer.restart()
        self._tell_saved()

    def _progress(self) -> dict[str, Any]:
        own = {
            "step": self.step,
            "evaluation_due": self.evaluation_due,
            "tracker": self.tracker.position(),
            "metrics": self.metrics,
            "totals": self.train_step.totals.state_dict(),
            "ema": bool(self.train_step.average.tensors),
        }
        return own | {name: part.state_dict() for name, part in self._stateful.items()}

    def _go_on_saving(self, *, wait: bool = False) -> None:
        """Go on with a checkpoint that is written in the background; `wait` until it is there."""
        saves = self.checkpointer.saves
        if saves.under_way is not None:
            spent = partial(self.meter.spent, "checkpoint")
            if wait:
                with spent():
                    saves.finish()
            else:
                saves.advance(spent)
            self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell those who wait for the checkpoint that was committed, if any."""
        committed = self.checkpointer.saves.committed
        while committed:
            saved = committed.pop(0)
            self.best.mark(saved.step)
            state = replace(self._state(), step=saved.step, metrics=saved.metrics)
            self.hooks.after_save(state, self.checkpointer.path(saved.step))

    @property
    def _stateful(self) -> dict[str, Any]:
        """What a checkpoint has beside model and optimizer; the meter needs the loader first."""
        return {
            "data": self.loader,
            "precision": self.train_step.model.precision,
            "health": self.train_step.health,
            "hooks": self.hooks,
            "schedule": self.schedule,
            "patience": self.patience,
            "best": self.best,
            "watch": self.watch,
            "meter": self.meter,
            "task": TaskState(self.train_step.task),
        }

    def _state(self, batch: Batch | None = None) -> RunState:
        """Return what a hook sees at this step."""
        step = self.train_step
        model = step.model.module, step.optimizer, step.task
        return RunState(self.step, *model, batch, self.metrics, self.tracker)
