"""Where the seconds of an attempt went: every moment since its process began is in one part.

    startup │ compute   compute   compute │ evaluation │ compute │ checkpoint │ ...
              └── of it: data_wait, communication, compile, as the meter finds them

The parts add up to the whole time, because one clock goes from part to part.
"""

import os
import time
from pathlib import Path

from hpctrain.base.processes import marks

_PARTS = (
    *("startup", "compile", "compute", "communication", "data_wait"),
    *("checkpoint", "evaluation", "other", "slow_rank"),
)
# Other parts belong to the phase that they are in: a report to its step, hooks to what they follow.
_PHASES = {"startup": marks.START_UP, "evaluation": marks.EVALUATION, "checkpoint": marks.SAVE}


class Account:
    """The seconds of an attempt by part; it begins in the part `startup`.

    `began` is on the clock of `time.monotonic`. `before_s` are the seconds of the attempts before,
    times the devices, such as GPUs, that each has occupied.
    """

    def __init__(self, began: float, devices: int = 1, before_s: float = 0.0) -> None:
        self.devices, self._before_s = devices, before_s
        self._began = self._since = began
        self._part = "startup"
        self._seconds = dict.fromkeys(_PARTS, 0.0)

    def enter(self, part: str) -> None:
        """Let what follows count for a part, such as `checkpoint`."""
        if part in _PHASES:
            marks.enter(_PHASES[part])
        now = time.monotonic()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def move(self, part: str, seconds: float, of: str = "compute") -> None:
        """Count so many seconds of what was counted for one part for another one."""
        self._seconds[of] -= seconds
        self._seconds[part] += seconds

    def lose(self, seconds: float) -> None:
        """Count so many seconds for `slow_rank`: of the waiting for others, then of the work."""
        waited = min(seconds, max(0.0, self._seconds["communication"]))
        self.move("slow_rank", waited, "communication")
        self.move("slow_rank", min(seconds - waited, max(0.0, self._seconds["compute"])))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part up to now."""
        now = time.monotonic()
        self._seconds[self._part] += now - self._since
        self._since = now
        return dict(self._seconds)

    @property
    def device_s(self) -> float:
        """The seconds so far times the devices, of this attempt and those before."""
        return self._before_s + (time.monotonic() - self._began) * self.devices


def process_began() -> float:
    """Return when this process began, on the clock of `time.monotonic`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
