"""When this attempt at a run began: with its process, or with the call of `hpctrain.train`."""

from __future__ import annotations

import os
import time
from pathlib import Path

_called: float | None = None


def call_begins() -> None:
    """Let the attempt begin now, in a process that has done other things before."""
    global _called
    _called = time.monotonic()


def attempt_began() -> float:
    """Return when the attempt began, on the clock of `time.monotonic`."""
    return _process_began() if _called is None else _called


def _process_began() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
