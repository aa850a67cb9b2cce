"""The checkpoints of a run: when one is due, what it has, and who waits for it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers
from hpctrain.engine.parts.improvement import Best


class Timer:
    """Tells when the seconds since the last checkpoint are over: the key `checkpoint.every_s`.

    rank 0's clock ── a flag in the reduction of the step ── all ranks save after the same step

    The clocks of ranks differ, so only that of one rank `decides`; it returns seconds that never
    decrease. As for a stop request, the flag is read after the step on the CPU, and after the next
    one on a GPU (see `Copied`).
    """

    def __init__(
        self, every_s: float, *, decides: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s, self._decides, self._clock = every_s, decides, clock
        self.restart()

    def flags(self) -> list[float]:
        """Return 1.0 if the time is over by the clock that decides."""
        return [float(self._decides and self._clock() - self._since >= self._every_s)]

    def offer(self, totals: Numbers) -> None:
        """Store the reduced flags without waiting for the device."""
        self._totals.offer(totals)

    def is_due(self) -> bool:
        """Return whether the ranks have agreed that it is time; the same on every rank."""
        return any(totals[0] > 0 for totals, _ in self._totals.take(late=True))

    def restart(self) -> None:
        """Count from now on, after what the timer was for."""
        self._since = self._clock()
        self._totals = Copied()  # a flag on its way asked for what was just done


class Saving:
    """Saves what the steps of a run need to go on: `every` some steps, by the clock, or the best.

    `session` are these steps, once they have begun. All ranks call the methods together.
    """

    session: Any  # hpctrain.engine.steps.stepping.Stepping

    def __init__(
        self,
        checkpointer: Checkpointer,
        every: int | None,
        timer: Timer | None = None,
        best: Best | None = None,
    ) -> None:
        self.checkpointer, self.every, self.timer = checkpointer, every, timer
        self.best, self._saved = best or Best(), 0

    def begin(self) -> None:
        """Begin at a step whose checkpoint, if any, is there."""
        self._saved = self.session.step
        self._restart()

    def mark_best(self) -> None:
        """Record the best value if its checkpoint is the last one."""
        self.best.mark(self._saved)

    @property
    def is_due(self) -> bool:
        """Whether this step saves a checkpoint."""
        step: int = self.session.step
        if self.every is not None and step % self.every == 0:
            return True
        return self.best.is_due(step) or (self.timer is not None and self.timer.is_due())

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint of this step was saved."""
        return bool(self.session.step == self._saved)

    def save(self, *, background: bool = False) -> None:
        """Save a checkpoint of this step, which then `is_done`."""
        self.go_on(wait=True)
        at = self.session
        with at.meter.spent("checkpoint"), at.display.doing("a checkpoint"):
            at.health.judge(late=False)
            at.tracker.sync()
            own = {"step": at.step, "tracker": at.tracker.position(), "metrics": at.metrics}
            own |= {name: part.state_dict() for name, part in at.stateful.items()}
            self.checkpointer.save(at.step, own, self.best.step, background=background)
            at.health.judge_state(self.checkpointer.wrong)
            self._restart()
        self._saved = at.step
        self._tell()

    def go_on(self, *, wait: bool = False) -> None:
        """Go on with a checkpoint that is written in the background; `wait` until it is there."""
        saves = self.checkpointer.saves
        if saves.under_way is None:
            return
        spent = partial(self.session.meter.spent, "checkpoint")
        if wait:
            with spent():
                saves.finish()
        else:
            saves.advance(spent)
        self._tell()

    def _restart(self) -> None:
        if self.timer is not None:
            self.timer.restart()

    def _tell(self) -> None:
        """Tell those who wait for the checkpoint that was committed, if any."""
        committed = self.checkpointer.saves.committed
        while committed:
            saved = committed.pop(0)
            self.best.mark(saved.step)
            folder = self.checkpointer.path(saved.step)
            self.session.call("after_save", saved.step, saved.metrics, folder)
