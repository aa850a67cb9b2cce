"""The training loop. It receives objects that are already built; `fit` reads top to bottom.

load the checkpoint, then loop { step; judge; log; evaluate; agree on stopping; save a checkpoint }

A stop request also ends an evaluation, between two of its batches. The checkpoint then says that
the evaluation is due, and the resumed run begins with it, so its metrics are logged once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpctrain import marks
from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.config.metric_registry import (
    EPOCH,
    GLOBAL_BATCH_SIZE,
    GRAD_NORM,
    LR,
    SKIPPED_STEPS,
)
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.distributed.long_work import first_in_long_work
from hpctrain.errors import HealthError
from hpctrain.faults.health import RolledBack
from hpctrain.faults.stop import Interrupted, Stop
from hpctrain.forks import ending_here
from hpctrain.models.dry_run import same_modes
from hpctrain.shards.types import Batch
from hpctrain.tasks import derived
from hpctrain.tracking.tracker import Tracker
from hpctrain.training.display import Display
from hpctrain.training.evaluation import evaluate_all
from hpctrain.training.hooks import Hooks, RunState
from hpctrain.training.improvement import Best, Improvement
from hpctrain.training.measuring.meter import Meter
from hpctrain.training.notes import Notes
from hpctrain.training.schedule import Schedule
from hpctrain.training.step import TrainStep
from hpctrain.training.watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Every:
    """Steps from one log line, evaluation or checkpoint to the next."""

    log: int
    evaluate: int | None  # None: at each end of an epoch
    checkpoint: int | None  # None: not by steps
    at_end: bool = True  # whether the last step of the run saves a checkpoint


@dataclass
class Outcome:
    """How `Trainer.fit` ended."""

    finished: bool  # False when the run was stopped and saved
    step: int
    first_step: int  # 0, or that of the checkpoint
    metrics: dict[str, float]  # the last values
    reason: str = ""  # why it has finished before `max_steps`


@dataclass
class Trainer:
    """The objects that a run consists of; `hpctrain.job.building.build` makes them."""

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
    step: int = 0
    evaluation_due: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> Outcome:
        """Train from the last checkpoint, or from step 0, to `max_steps` or a stop request.

        Raises:
            HealthError: A loss, a gradient or a parameter is not finite, and the run must stop.
            RolledBack: The run goes on from its newest healthy checkpoint: build it again.
        """
        first_step = self._resume()
        health = self.train_step.health
        self.display.start(self.step, self.max_steps)
        self.train_step.save_timer.restart()
        saved, epoch = self.step, self.loader.epoch
        self.meter.begin(self.step)
        with self._closing(), ending_here():
            stopped = not self._caught_up()
            self.best.mark(saved)
            for batch in () if stopped or self.patience.is_over else self._batches():
                samples = partial(self.loader.samples, self.loader.last)
                consumed = self.loader.state_dict()["consumed"]
                health.begin(self.step + 1, consumed, samples, batch)
                self.train_step(batch, self.schedule(self.step))
                self.step = self.notes.step = self.step + 1
                self.meter.after_step(self.step, consumed, batch)
                self.display.advance(self.step)
                self.hooks.after_step(self._state(batch))
                self._go_on_saving()
                done = self.step == self.max_steps
                logs = self.step % self.every.log == 0 or done
                health.judge(late=not logs)
                if done:
                    self.train_step.finish()
                if logs:
                    self._report()
                due = self._ends_interval(epoch) or self.train_step.timer.is_due() or done
                epoch = self.loader.epoch
                if due or any(asked.is_doubtful(self.metrics) for asked in self.asked):
                    self.evaluation_due = True
                stopped = not self._evaluated() or (self.stop.agreed and not done)
                if stopped:
                    break
                over = self.patience.is_over
                if over and not done:
                    self.train_step.finish()
                last = (done or over) and self.every.at_end
                if self._save_is_due() or last:
                    self._save(background=not last)
                    saved = self.step
                if over:
                    break
            else:
                stopped = stopped or (bool(self.stop.reason) and self.step < self.max_steps)
            if self.step != saved and (stopped or self.every.at_end):
                self._save()
            self._go_on_saving(wait=True)
        early = self.patience.is_over and self.step < self.max_steps
        reason = self.patience.reason if early and not stopped else ""
        return Outcome(not stopped, self.step, first_step, self.metrics, reason)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
            marks.enter(marks.END)
        except (HealthError, RolledBack):  # all ranks raise these together
            self._go_on_saving(wait=True)
            raise
        except BaseException:
            marks.enter(marks.END)
            self.checkpointer.saves.rescue()
            raise
        finally:
            self.checkpointer.saves.close()
            self.meter.close()
            self.display.close()
            self.loader.close()
            for feed in self.evaluations.values():
                feed.close()

    def _batches(self) -> Iterator[Batch]:
        left_out = self.train_step.health.left_out
        batches = first_in_long_work("the first batch", self.loader)
        while self.step < self.max_steps:
            given = self.loader.state_dict()
            marks.begin_step()
            try:
                with self.stop.interrupts():
                    batch = next(batches, None)
            except Interrupted:
                self.loader.load_state_dict(given)
                return
            if batch is None:
                return
            if left_out and self.loader.state_dict()["consumed"] in left_out:
                continue
            yield batch
            del batch

    def _report(self) -> None:
        """Log the steps since the last report."""
        means = self._training_means()  # it waits for a GPU, whose steps are measured
        with self.meter.spent("other"):
            self._log(self.meter.report(self.train_step.totals.counts) | means)
            silent = self.train_step.silent
            layers = silent.read(self.train_step.model)
            self.watch.report(self.step, layers, silent.layers)

    def _training_means(self) -> dict[str, float]:
        means = derived(self.train_step.task, self.train_step.totals.means())
        if math.isnan(means.get("bubble", 0.0)):  # the first step of a pipeline measures none
            del means["bubble"]
        skipped = self.train_step.health.skipped
        return (
            {f"train/{name}": value for name, value in means.items()}
            | {GRAD_NORM: float(self.train_step.grad_norm)}
            | ({SKIPPED_STEPS: skipped} if skipped else {})
            | ({GLOBAL_BATCH_SIZE: self.loader.batch_size} if self.train_step.parts else {})
            | {LR: self.schedule(self.step - 1), EPOCH: self.loader.epoch}
        )

    def _caught_up(self) -> bool:
        """Make the evaluation that a stop has ended before, if any; False when it is still due."""
        due = self.evaluation_due
        if not self._evaluated():
            return False
        if due and self.patience.is_over and self.step < self.max_steps:
            # It ends the run, and that attempt could not know that its checkpoint was the last.
            self.train_step.finish()
            self._save()
        return True

    def _ends_interval(self, epoch: int) -> bool:
        """Return whether an evaluation follows this step; `epoch` was that before the step."""
        every = self.every.evaluate
        return self.loader.epoch > epoch if every is None else self.step % every == 0

    def _save_is_due(self) -> bool:
        by_steps = self.every.checkpoint is not None and self.step % self.every.checkpoint == 0
        return by_steps or self.best.is_due(self.step) or self.train_step.save_timer.is_due()

    def _evaluated(self) -> bool:
        """Make the evaluation that is due, if any; return False when it is still due."""
        if not self.evaluation_due:
            return True
        self.train_step.health.judge(late=False)
        if self.evaluations:
            doing = self.display.doing("an evaluation")
            modes = same_modes(self.train_step.model.module)
            # The random state is restored, as an evaluation may be made twice.
            random = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
            with self.meter.spent("evaluation"), doing, random, modes:
                self.hooks.before_evaluation(self._state())
                with self.checkpointer.modes.evaluating(), self.train_step.average.applied():
                    values = evaluate_all(self.train_step, self.evaluations, self.stop)
            if values is None:
                return False
            with self.meter.spent("other"):
                self._log(values | self.meter.evaluated())
            self.watch.evaluated(values, self.step)
            self.hooks.after_evaluation(self._state())
            wrong = [f"{name}={v}" for name, v in values.items() if not math.isfinite(v)]
            if wrong and dist.get_rank() == 0:
                log.warning("step %d: not finite: %s", self.step, ", ".join(wrong))
        self.train_step.timer.restart()
        self.evaluation_due = False
        return True

    def _log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.tracker.log_metrics(metrics, self.step)
        self.display.report(self.step, metrics)
        for asked in self.asked:
            asked.check(self.metrics)
        self.schedule.judge(metrics, self.step)
        self.patience.judge(metrics, self.step)
        if self.patience.is_over:
            self.watch.ends(self.step)
        if self.best.judge(metrics, self.step):
            self.tracker.log_metrics(self.best.metrics, self.step)

    def _save(self, *, background: bool = False) -> None:
        self._go_on_saving(wait=True)
        with self.meter.spent("checkpoint"), self.display.doing("a checkpoint"):
            self._write_checkpoint(background)
        self._tell_saved()

    def _write_checkpoint(self, background: bool) -> None:
        self.train_step.health.judge(late=False)
        self.tracker.sync()
        self.checkpointer.save(
            self.step,
            {
                "step": self.step,
                "evaluation_due": self.evaluation_due,
                "tracker": self.tracker.position(),
                "metrics": self.metrics,
                "totals": self.train_step.totals.state_dict(),
                "ema": bool(self.train_step.average.tensors),
            }
            | {name: part.state_dict() for name, part in self._stateful.items()},
            best=self.best.step,
            background=background,
        )
        self.train_step.health.judge_state(self.checkpointer.wrong)
        self.train_step.save_timer.restart()

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
            "timer": self.train_step.timer,
            "hooks": self.hooks,
            "schedule": self.schedule,
            "patience": self.patience,
            "best": self.best,
            "watch": self.watch,
            "meter": self.meter,
        }

    def _state(self, batch: Batch | None = None) -> RunState:
        """Return what a hook sees at this step."""
        return RunState(
            step=self.step,
            model=self.train_step.model.module,
            optimizer=self.train_step.optimizer,
            task=self.train_step.task,
            batch=batch,
            metrics=self.metrics,
            tracker=self.tracker,
        )

    def _resume(self) -> int:
        marks.enter(marks.LOAD)
        first = self.every.checkpoint or self.max_steps + 1
        by_clock = bool(self.train_step.save_timer.flags())
        if self.every.at_end or first <= self.max_steps or by_clock or self.best.metric is not None:
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
                seconds = time.monotonic() - began
                log.info(
                    "going on from the checkpoint of step %d (read in %.1f s)", self.step, seconds
                )
        else:
            self.checkpointer.modes.train()
        # After a rollback without a checkpoint the run starts at step 0 again.
        self.tracker.rewind(progress["tracker"] if progress is not None else 0)
        self.notes.begin(self.step)
        dist.barrier()
        return self.step
