"""Stop requests: a signal or the stop file sets a flag, and all ranks stop at the same step.

    SIGINT            Ctrl-C: save and stop; a second one ends the process at once
    SIGTERM, SIGUSR2  preemption, time limit: save, stop and requeue
    the stop file     `hpctrain cancel --save`: save and stop, without a requeue

A Python signal handler does not run while the main thread is blocked in a collective, so a small
thread receives the signals through `signal.set_wakeup_fd`. The flags, one for each reason, are
part of the reduction that every step makes anyway. On the CPU they are read after the step, and on
a GPU after the next one (see `Copied`). So no step waits for them, and all ranks see
the same reason at the same step, whichever rank was asked first.

A rank that cannot stop in time, because its step or its save does not end, says where it is and
exits before Slurm kills it: the batch script can still requeue the job.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpctrain.base import forks
from hpctrain.base.processes import frames, marks
from hpctrain.engine.faults import early_signals as signals
from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# If the ranks have different reasons, the first of these counts: after a stop request by the user
# the job must not be requeued.
_REASONS = ("cancel", *(number.name for number in SIGNALS))
_NOBODY = [0.0] * len(_REASONS)
_LOOK_EVERY_S = 5.0
_KERNEL_LATER_S = 3.0
_EXIT = 143  # as after a signal: the batch script requeues the job
log = logging.getLogger(__name__)


class Stop:
    """A context manager that collects stop requests until the ranks have agreed on one.

    Attributes:
        asked: The first stop request of this rank, one of _REASONS: the name of a signal, or
            "cancel" for the stop file; "" while there is none.
        reason: The reason that the ranks have agreed on, one of _REASONS; "" until then.
        limits_s: How many seconds after a signal this rank exits, by the name of the signal.
        tell: Called with the reason before it exits so.
        due_s: Asked again and again after `watch`: the seconds left if the time limit is near.
    """

    def __init__(self, limits_s: Mapping[str, float] | None = None) -> None:
        self.asked = self.reason = ""
        self.limits_s = limits_s or {}
        self.tell: Callable[[str], None] = log.error
        self.due_s: Callable[[], float | None] = lambda: None
        self._began = self._exit_at = math.inf
        self._file: Path | None = None
        self._totals = Copied()

    def __enter__(self) -> Stop:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        # In this order no signal is lost: one that arrives in between is noted and written.
        self._wakeup = forks.wakeup(self._writing.fileno())
        self._wakeup.__enter__()
        self._previous = {number: forks.handle(number, self._heard) for number in SIGNALS}
        for number in signals.noted:
            self._ask(signal.Signals(number).name)
        self._listener = threading.Thread(target=self._listen, name="hpctrain-signals", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.met()
        self._wakeup.__exit__(None, None, None)
        forks.give_back(self._previous, self._heard)
        self._writing.close()
        # A thread that frees tensors while the interpreter shuts down aborts the process.
        self._listener.join()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the thread gets the number of the signal."""

    def _listen(self) -> None:
        while True:
            if self._file is not None:
                self._look()
                if os.path.exists(self._file):
                    self._ask("cancel")
                if not self.asked and (due_s := self.due_s()) is not None:
                    self._ask("SIGUSR2", due_s)
            if time.monotonic() > self._exit_at:
                self._exit()
            try:
                data = self._reading.recv(64)
            except TimeoutError:
                continue
            if not data:
                break
            for number in data:
                if number not in SIGNALS:
                    continue
                if number == signal.SIGINT and self.asked == "SIGINT":
                    marks.leave()
                    os._exit(130)
                self._ask(signal.Signals(number).name)
        self._reading.close()

    def _ask(self, reason: str, limit_s: float | None = None) -> None:
        if self.asked:
            return
        self.asked, self._began = reason, time.monotonic()
        if (limit_s := limit_s or self.limits_s.get(reason)) is not None:
            self._exit_at = self._began + limit_s
            self._reading.settimeout(min(_LOOK_EVERY_S, max(0.1, limit_s / 10)))
            # The thread cannot exit while C code holds Python's lock. The kernel can.
            signal.setitimer(signal.ITIMER_REAL, limit_s + _KERNEL_LATER_S)

    def met(self) -> None:
        """Note that the training has stopped, so that this rank need not exit."""
        if self._exit_at < math.inf:
            self._exit_at = math.inf
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _exit(self) -> None:
        """End this process: it has not stopped, and Slurm would kill it in a moment."""
        place = frames.place(frames.of_main_thread()) or "a place in Python or torch"
        took_s = time.monotonic() - self._began
        with suppress(Exception):  # a disk is full, or stderr is no file
            self.tell(f"asked to stop by {self.asked} {took_s:.0f} s ago, it is still at {place}")
            faulthandler.dump_traceback()
        os._exit(_EXIT)

    def watch(self, file: Path, look: Callable[[], None] = lambda: None) -> None:
        """Take the existence of `file` as a stop request, too; one rank that looks is enough.

        Every few seconds `look` is called, too.
        """
        self._look, self._file = look, file
        self._reading.settimeout(_LOOK_EVERY_S)
        self._writing.send(b"\0")  # no signal has number 0: this only wakes the thread

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction: 1.0 or 0.0 for each of _REASONS."""
        return [float(self.asked == reason) for reason in _REASONS] if self.asked else [*_NOBODY]

    def offer(self, totals: Numbers) -> None:
        """Store the reduced flags, one for each of _REASONS, without waiting for the device."""
        self._totals.offer(totals)

    @property
    def agreed(self) -> bool:
        """Whether any rank has had a stop request; the same on every rank.

        It says so after the `offer` in which the request was; on a GPU after the next one.
        """
        for totals, _ in self._totals.take(late=True):
            if any(totals):
                asked = zip(_REASONS, totals, strict=True)
                self.reason = next(reason for reason, ranks in asked if ranks)
        return bool(self.reason)
