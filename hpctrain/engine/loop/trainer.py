"""The training loop. It receives objects that are already built; `fit` reads top to bottom.

load the checkpoint, then loop { step; judge; log; evaluate; agree on stopping; save a checkpoint }

A stop request also ends an evaluation, between two of its batches. The checkpoint then says that
the evaluation is due, and the resumed run begins with it, so its metrics are logged once.

The training may be asked to pause at a step. There it saves, and only then evaluates, if no
evaluation was due: so nothing of it is in the checkpoint, and the resumed run is the undisturbed
one. `tracker.rewind` drops the metrics of that evaluation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from hpctrain.base.processes import marks
from hpctrain.config.metric_registry import EPOCH, GLOBAL_BATCH_SIZE, LR
from hpctrain.data.generators import same_generators
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed.long_work import first_in_long_work
from hpctrain.engine.faults.health import RolledBack
from hpctrain.engine.layers.dry_run import same_modes
from hpctrain.engine.loop.evaluation import evaluate_all
from hpctrain.engine.loop.run_parts import RunParts
from hpctrain.errors import ConfigError, HealthError

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """How `Trainer.fit` ended."""

    finished: bool  # False when the run was stopped, or has paused, and saved
    step: int
    first_step: int  # 0, or that of the checkpoint
    metrics: dict[str, float]  # the last values
    reason: str = ""  # why it has finished before `max_steps`
    paused: bool = False  # at the step `until`, with its metrics


class Trainer(RunParts):
    """Trains the model of a run, evaluates it and saves it."""

    def fit(self) -> Outcome:
        """Train from the last checkpoint, or from step 0, to `max_steps` or a stop request.

        It pauses after the step `until`, if the run does not end there.

        Raises:
            ConfigError: The run has made more steps than `until`.
            HealthError: A loss, a gradient or a parameter is not finite, and the run must stop.
            RolledBack: The run goes on from its newest healthy checkpoint: build it again.
        """
        first_step = self._resume()
        if self.until is not None and first_step > self.until:
            raise ConfigError(
                f"--until-step {self.until}: the run is at step {first_step} already; give a later "
                "step, or none to train to the end"
            )
        health = self.train_step.health
        self.display.start(self.step, self.max_steps)
        self.train_step.save_timer.restart()
        saved, epoch = self.step, self.loader.epoch
        self.meter.begin(self.step)
        with self._closing():
            stopped = not self._caught_up()
            self.best.mark(saved)
            ends = stopped or self.patience.is_over or self._pauses
            for batch in () if ends else self._batches():
                samples = partial(self.loader.samples, self.loader.last)
                consumed = self.loader.state_dict()["consumed"]
                health.begin(self.step + 1, consumed, samples, batch)
                self.look.before_step(batch)
                self.train_step(batch, self.schedule(self.step))
                self.look.after_step(batch)
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
                due = self._ends_interval(epoch) or done
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
                if over or self._pauses:
                    break
            if self.step != saved and (stopped or self._pauses or self.every.at_end):
                self._save()
            self._go_on_saving(wait=True)
            paused = not stopped and self._pauses
            stopped = stopped or (paused and not self._evaluated_aside())
        early = self.patience.is_over and self.step < self.max_steps
        reason = self.patience.reason if early and not stopped else ""
        finished, paused = not (stopped or paused), paused and not stopped
        return Outcome(finished, self.step, first_step, self.metrics, reason, paused)

    @property
    def _pauses(self) -> bool:
        return self.step == self.until and self.step < self.max_steps and not self.patience.is_over

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
            marks.begin_step()
            if (batch := next(batches, None)) is None:
                return
            if left_out and self.loader.state_dict()["consumed"] in left_out:
                continue
            yield batch
            del batch

    def _report(self) -> None:
        """Log the steps since the last report."""
        means = self.train_step.means()  # it waits for a GPU, whose steps are measured
        if self.train_step.parts:
            means[GLOBAL_BATCH_SIZE] = self.loader.batch_size
        means |= {LR: self.schedule(self.step - 1), EPOCH: self.loader.epoch}
        with self.meter.spent("other"):
            self._log(self.meter.report(self.train_step.totals.counts) | means)
            silent = self.train_step.silent
            layers = silent.read(self.train_step.model)
            self.watch.report(self.step, layers, silent.layers)

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

    def _evaluated(self) -> bool:
        """Make the evaluation that is due, if any; return False when it is still due."""
        if not self.evaluation_due:
            return True
        self.train_step.health.judge(late=False)
        if self.evaluations:
            values = self._values()
            if values is None:
                return False
            with self.meter.spent("other"):
                self._log(values | self.meter.evaluated())
            self.hooks.after_evaluation(self._state())
            wrong = [f"{name}={v}" for name, v in values.items() if not math.isfinite(v)]
            if wrong and dist.get_rank() == 0:
                log.warning("step %d: not finite: %s", self.step, ", ".join(wrong))
        self.evaluation_due, self.evaluated_at = False, self.step
        return True

    def _values(self) -> dict[str, float] | None:
        """Return the metrics of an evaluation; None when the ranks agree to stop."""
        doing = self.display.doing("an evaluation")
        modes = same_modes(self.train_step.model.module)
        # The random states are restored, as an evaluation may be made twice.
        with self.meter.spent("evaluation"), doing, same_generators(), modes:
            self.hooks.before_evaluation(self._state())
            with self.checkpointer.modes.evaluating(), self.train_step.average.applied():
                return evaluate_all(self.train_step, self.evaluations, self.stop)

    def _evaluated_aside(self) -> bool:
        """Take the metrics of the step of a pause; False when the ranks agree to stop.

        The checkpoint was saved before, so patience, schedule and sums may not see them.
        """
        logged = self.step % self.every.log == 0
        values = {} if logged else self.train_step.means()
        if self.evaluations and self.evaluated_at != self.step:
            found = self._values()
            if found is None:
                return False
            values |= found
            self.hooks.after_evaluation(self._state())
        self.metrics = self.metrics | values
        self.tracker.log_metrics(values, self.step)
        self.display.report(self.step, values)
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
