"""Asked to stop: signals set a flag, the ranks agree on it, nobody stops alone.

    SIGINT            Ctrl-C: stop and save; a second one ends the process at once
    SIGTERM, SIGUSR2  preemption, time limit: stop, save, come back (requeue)
    a stop file       `hpctrain cancel`: stop, save, do not come back

A Python handler does not run while the main thread is blocked in a collective, so the signal
reaches a small thread through `signal.set_wakeup_fd`. A flag for each reason travels with the
step's own reduction and is read one step later: no rank waits for it, and all see the same reason
at the same step, whichever of them was asked first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from pathlib import Path

import torch

from hpctrain.faults import early_signals as signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# If the ranks have different reasons, the first of these counts: after a stop request by the user
# the job must not be requeued.
REASONS = ("cancel", *(number.name for number in SIGNALS))
_LOOK_S = 5.0


def stop_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank when the process that started it dies.

    torchrun and submitit's local controller, killed with SIGKILL, leave their ranks running:
    nobody would know, and the same command would find the run in use.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


class Stop:
    """A context manager that turns signals into an agreed decision.

    Attributes:
        asked: what this rank was asked by first: one of REASONS, a signal's name or "cancel" for
            the stop file; "" when it was not.
        reason: what the ranks have agreed to stop for, one of REASONS; "" until they have.
    """

    def __init__(self) -> None:
        self.asked = self.reason = ""
        self._file: Path | None = None
        self._totals: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __enter__(self) -> Stop:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        # In this order none is lost: one that comes between is noted and written.
        self._previous_fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._previous = {sig: signal.signal(sig, lambda *_: None) for sig in SIGNALS}
        for number in signals.noted:
            self._ask(signal.Signals(number).name)
        self._listener = threading.Thread(target=self._listen, name="hpctrain-signals", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)
        self._writing.close()
        # A thread that still lets go of tensors while the interpreter ends aborts the process.
        self._listener.join()

    def _listen(self) -> None:
        while True:
            if self._file is not None and os.path.exists(self._file):
                self._ask("cancel")
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
                    os._exit(130)
                self._ask(signal.Signals(number).name)
        self._reading.close()

    def _ask(self, reason: str) -> None:
        self.asked = self.asked or reason

    def watch(self, file: Path) -> None:
        """From now on, stop as well when this file is there; one rank that looks is enough."""
        self._file = file
        self._reading.settimeout(_LOOK_S)
        self._writing.send(b"\0")  # no signal's number: only ends the wait without a limit

    def flags(self) -> list[float]:
        """What this rank adds to the step's reduction: for each of REASONS 1.0 or 0.0."""
        return [float(self.asked == reason) for reason in REASONS]

    def offer(self, totals: torch.Tensor) -> None:
        """Take the reduced flags, shape (len(REASONS),), without waiting for the device."""
        if totals.device.type == "cuda":
            if self._copied is None:
                self._totals = torch.zeros(len(REASONS), pin_memory=True)
                self._copied = torch.cuda.Event()
            assert self._totals is not None
            self._totals.copy_(totals, non_blocking=True)
            self._copied.record()
        else:
            self._totals = totals

    @property
    def agreed(self) -> bool:
        """True on every rank at the same step, when any was asked to stop by the last `offer`."""
        if self._copied is not None:
            # Recorded a whole step ago: it has passed, unless the device is a step behind.
            self._copied.synchronize()
        if self._totals is not None:
            asked = zip(REASONS, self._totals.tolist(), strict=True)
            self.reason = next((reason for reason, ranks in asked if ranks), "")
        return bool(self.reason)
