"""Signals that come before the training can act on them.

Importing torch takes seconds, on a busy file system minutes. A preemption in that time would end
the ranks by themselves, and Slurm calls such a job failed and does not bring it back. So they are
noted from the first line on; `hpctrain.faults.stop` takes them over and the run saves, requeues and
stops as soon as it can.
"""

from __future__ import annotations

import signal
from types import FrameType

noted: list[int] = []


def note() -> None:
    """Note preemption and the warning before the time limit instead of dying of them."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    noted.append(number)
