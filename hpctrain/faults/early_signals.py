"""Signals that arrive before the training can act on them.

Importing torch takes seconds, on a busy file system minutes. A preemption signal in that time
would kill the ranks, and Slurm would count the job as failed and not requeue it. So the signals are
noted from the first line on. `hpctrain.faults.stop` takes them over, and the run then saves,
requeues and stops as soon as it can.
"""

from __future__ import annotations

import signal
from types import FrameType

noted: list[int] = []


def note() -> None:
    """Note the signals of preemption and time limit, which would otherwise end the process."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    noted.append(number)
