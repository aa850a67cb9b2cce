"""The training loop. It receives objects that are already built; `fit` reads top to bottom.

load the checkpoint, then loop { step; judge; log; evaluate; agree on stopping; save a checkpoint }

A stop request also ends an evaluation, between two of its batches. The checkpoint then says that
the evaluation is due, and the resumed run begins with it, so its metrics are logged once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hpctrain import marks
from hpctrain.config.metric_registry import EPOCH, GLOBAL_BATCH_SIZE, LR
from hpctrain.distributed.long_work import first_in_long_work
from hpctrain.errors import HealthError
from hpctrain.faults.health import RolledBack
from hpctrain.faults.stop import Interrupted
from hpctrain.forks import ending_here
from hpctrain.models.dry_run import same_modes
from hpctrain.shards.types import Batch
from hpctrain.training.evaluation import evaluate_all
from hpctrain.training.run_parts import RunParts

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """How `Trainer.fit` ended."""

    finished: bool  # False when the run was stopped and saved
    step: int
    first_step: int  # 0, or that of the checkpoint
    metrics: dict[str, float]  # the last values
    reason: str = ""  # why it has finished before `max_steps`


class Trainer(RunParts):
    """Trains the model of a run, evaluates it and saves it."""

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
