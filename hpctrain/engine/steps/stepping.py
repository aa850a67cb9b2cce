"""The steps of a run, for any loop: our own is written with them, and so is a user's.

load the checkpoint, then for each batch: { the loop's step; judge; log; what is due between two
steps; agree on stopping; save a checkpoint }

A stop request also ends what is due between two steps, such as an evaluation. The checkpoint then
says that it is due, and the resumed run begins with it, so its metrics are logged once.

The training may be asked to pause at a step. There it saves, and only then do parts measure what
the pause is for: so nothing of it is in the checkpoint, and the resumed run is the undisturbed one.
`tracker.rewind` drops the metrics of the pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from hpctrain.base.errors import ConfigError, HealthError
from hpctrain.base.names.step_names import step_of
from hpctrain.base.processes import marks
from hpctrain.config.metric_registry import EPOCH
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed.long_work import first_in_long_work
from hpctrain.engine.faults.health import Health, RolledBack
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.feeds import Feed
from hpctrain.engine.parallel.reducing.scalars import Exchange
from hpctrain.engine.part import Part, overriding
from hpctrain.engine.parts.display import Display
from hpctrain.engine.parts.meter import Meter
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.steps.saving import Saving
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)
_END: Any = object()  # what follows the last batch


@dataclass
class Outcome:
    """How the steps have ended."""

    finished: bool  # False when the run was stopped, or has paused, and saved
    step: int
    first_step: int  # 0, or that of the checkpoint
    metrics: dict[str, float]  # the last values
    reason: str = ""  # why it has finished before `max_steps`
    paused: bool = False  # at the step `until`, with its metrics


@dataclass
class Stepping:
    """The steps of one run on this rank; all ranks make them together.

    `parts` are called in their order. `states` are other objects with a state in the checkpoint, by
    name. `began_from` is called with the step from which the run goes on, and the damaged ones.
    """

    feed: Feed
    saving: Saving
    exchange: Exchange
    tracker: Tracker
    display: Display
    stop: Stop
    health: Health
    meter: Meter
    max_steps: int
    log_every: int  # steps from one report of metrics to the next
    parts: Sequence[Part] = ()
    states: Mapping[str, Any] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    counts: Callable[[], Mapping[str, float]] = dict  # what the means of a report were divided by
    began_from: Callable[[int, Collection[int]], None] = lambda step, damaged: None
    until: int | None = None  # the global step after which the training pauses
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None  # once the steps have ended
    _began: bool = False
    _enders: Sequence[Part] = ()

    def steps(self) -> Iterator[tuple[int, Batch]]:
        """Yield the steps that were made before a step, and its batch, up to `max_steps`.

        They go on from the last checkpoint, or from step 0, until a stop request, the end that a
        part wants, or the step `until`. The loop is in the context `closing`.

        Raises:
            ConfigError: The run has made more steps than `until`.
            HealthError: A number is not finite, and the run must stop.
            RolledBack: The run goes on from its newest healthy checkpoint: build it again.
        """
        asking = [each for each in self.parts if type(each).flags is not Part.flags]
        self.exchange.asking += asking
        self._enders = [each for each in self.parts if type(each).over is not Part.over]
        first_step = self._resume()
        self._began = True
        over_before = self._over
        between = overriding(self.parts, "between")
        stopped = not all(call(self.step) for call in between)
        if self._over and not over_before and not stopped and self.step < self.max_steps:
            # It ends the run, and that attempt could not know that its checkpoint was the last.
            self.call("finish")
            self.saving.save()
        self.saving.mark_best()
        before, after = (overriding(self.parts, f"{when}_step") for when in ("before", "after"))
        wants = overriding(self.parts, "wants_report")
        ends = stopped or bool(self._over) or self._pauses
        for batch in () if ends else self._batches():
            consumed = self.feed.state_dict()["consumed"]
            samples = partial(self.feed.samples, self.feed.last)
            self.health.begin(self.step + 1, consumed, samples, batch)
            for call in before:
                call(batch)
            yield self.step, batch
            self.step = self.notes.step = self.step + 1
            self.meter.after_step(self.step, consumed, batch)
            self.display.advance(self.step)
            for call in after:
                call(self.step, batch)
            self.saving.go_on()
            done = self.step == self.max_steps
            logs = self.step % self.log_every == 0 or done or any(call() for call in wants)
            self.health.judge(late=not logs)
            if done:
                self.call("finish")
            if logs:
                self._report()
            stopped = not all(call(self.step) for call in between)
            stopped = stopped or (self.stop.agreed and not done)
            if stopped:
                break
            over = bool(self._over)
            if over and not done:
                self.call("finish")
            last = done or over
            if self.saving.is_due or last:
                self.saving.save(background=not last)
            if over or self._pauses:
                break
        self._end(first_step, stopped)

    def _end(self, first_step: int, stopped: bool) -> None:
        """Save if that is left, and note how the steps have ended; they may be `stopped`."""
        if not self.saving.is_done:
            self.saving.save()
        self.saving.go_on(wait=True)
        paused = not stopped and self._pauses
        stopped = stopped or (paused and not self._measured_aside())
        early = "" if stopped or self.step == self.max_steps else self._over
        finished, paused = not (stopped or paused), paused and not stopped
        self.outcome = Outcome(finished, self.step, first_step, self.metrics, early, paused)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End what the run has started; after an error, a checkpoint under way is still saved."""
        try:
            yield
            marks.enter(marks.END)
        except (HealthError, RolledBack):  # all ranks raise these together
            self.saving.go_on(wait=True)
            raise
        except BaseException:
            marks.enter(marks.END)
            self.saving.checkpointer.saves.rescue()
            raise
        finally:
            self.saving.checkpointer.saves.close()
            if self._began:
                self.meter.close()
                self.display.close()
            self.feed.close()
            for close in overriding(self.parts, "close"):
                close()
            # Else the models would live until Python looks for circles.
            self._tell_parts(None)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of this step, the same on all ranks."""
        values = dict(metrics)
        self.metrics |= values
        self.tracker.log_metrics(values, self.step)
        self.display.report(self.step, values)
        for logged in overriding(self.parts, "logged"):
            logged(values, self.step)
        if self._over:
            self.call("ends", self.step)
        if self.saving.best.judge(values, self.step):
            self.tracker.log_metrics(self.saving.best.metrics, self.step)

    @property
    def _over(self) -> str:
        """Why the training ends early, as a part wants it; "" if it does not."""
        return next(filter(None, (part.over for part in self._enders)), "")

    @property
    def _pauses(self) -> bool:
        return self.step == self.until and self.step < self.max_steps and not self._over

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the parts that have one, in their order."""
        for call in overriding(self.parts, method):
            call(*arguments)

    def _batches(self) -> Iterator[Batch]:
        left_out = self.health.left_out
        batches = first_in_long_work("the first batch", self.feed)
        while self.step < self.max_steps:
            marks.begin_step()
            if (batch := next(batches, _END)) is _END:
                return
            if left_out and self.feed.state_dict()["consumed"] in left_out:
                continue
            yield batch
            del batch

    def _report(self) -> None:
        """Log the steps since the last report."""
        found: dict[str, float] = {}
        for report in overriding(self.parts, "report"):
            found |= report()  # it waits for a GPU, whose steps are measured
        with self.meter.spent("other"):
            self.log(self.meter.report(self.counts()) | found | {EPOCH: self.feed.epoch})
            self.call("reported", self.step)

    def _measured_aside(self) -> bool:
        """Take the metrics of the step of a pause; False when the ranks agree to stop.

        The checkpoint was saved before, so no part may see them.
        """
        values: dict[str, float] = {}
        if self.step % self.log_every:
            for report in overriding(self.parts, "report"):
                values |= report()
        for at_pause in overriding(self.parts, "at_pause"):
            if (found := at_pause()) is None:
                return False
            values |= found
        self.metrics = self.metrics | values
        self.tracker.log_metrics(values, self.step)
        self.display.report(self.step, values)
        return True

    def _resume(self) -> int:
        """Go on from the newest checkpoint, if there is one; return its step, or 0."""
        marks.enter(marks.LOAD)
        self._tell_parts(self)
        self.saving.checkpointer.prove()
        began, checkpointer = time.monotonic(), self.saving.checkpointer
        progress = checkpointer.load_latest()
        if progress is not None:
            self._go_on_from(progress, began)
        else:
            checkpointer.modes.train()
        self.call("begin", self.step)
        self.began_from(self.step, {step_of(path) for path in checkpointer.committed.damaged})
        # After a rollback without a checkpoint the run starts at step 0 again.
        self.tracker.rewind(progress["tracker"] if progress is not None else 0)
        self.notes.begin(self.step)
        dist.barrier()
        if self.until is not None and self.step > self.until:
            raise ConfigError(
                f"--until-step {self.until}: the run is at step {self.step} already; give a later "
                "step, or none to train to the end"
            )
        self.display.start(self.step, self.max_steps)
        self.saving.begin()
        self.meter.begin(self.step)
        return self.step

    def _go_on_from(self, progress: Mapping[str, Any], began: float) -> None:
        """Take the state in a checkpoint, whose loading began at a time of `time.monotonic`."""
        self.step, self.metrics = progress["step"], progress["metrics"]
        for name, part in self.stateful.items():
            part.load_state_dict(progress.get(name, {}))  # older checkpoints lack some
        if dist.get_rank() == 0:
            known = self.step, time.monotonic() - began
            log.info("going on from the checkpoint of step %d (read in %.1f s)", *known)

    def _tell_parts(self, session: Stepping | None) -> None:
        self.saving.session = session
        for part in self.parts:
            part.session = session

    @property
    def stateful(self) -> dict[str, Any]:
        """What a checkpoint has beside models and optimizers; the meter needs the feed first."""
        named = {part.name: part for part in self.parts if part.name}
        own = {"data": self.feed, "health": self.health, "best": self.saving.best}
        return {**own, "meter": self.meter, **named, **self.states}
