"""The clocks of a run: where its seconds go, how long each step took, when a checkpoint is due."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path

import torch

from hpctrain.base.processes import marks
from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers

_PENDING = 256  # events; beyond that, those that have passed are read at each step


class StepTimes:
    """The times of the steps since the last `take`.

    begin ── step ── step ── pause ── begin ── step        three times, each from end to end

    On a GPU the host runs ahead of the device. So events mark the ends of the steps in the stream
    of the training, and the times are those between the events; the host does not wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[float] = []
        self._ends: list[float] = []  # on a CPU: readings of the clock, from the last `begin` on
        self._events: deque[torch.cuda.Event] = deque()

    def begin(self) -> None:
        """Begin to measure here: what was before belongs to no step."""
        if self._on_gpu:
            self._read_events()
            self._events = deque([_event()])
        else:
            self._read_ends()
            self._ends = [time.perf_counter()]

    def step(self) -> None:
        """Note the end of a step."""
        if self._on_gpu:
            self._events.append(_event())
            while len(self._events) > _PENDING and self._events[1].query():
                self._read_event()
        else:
            self._ends.append(time.perf_counter())

    def since_step(self) -> float:
        """Return the seconds since the last step or `begin`; 0 on a GPU, which may compute yet."""
        return 0.0 if self._on_gpu or not self._ends else time.perf_counter() - self._ends[-1]

    def take(self) -> list[float]:
        """Return the seconds of the steps since the last call; on a GPU, wait for the last one."""
        if self._on_gpu:
            self._read_events()
        else:
            self._read_ends()
        times, self._times = self._times, []
        return times

    def _read_ends(self) -> None:
        self._times += map(sub, self._ends[1:], self._ends)
        del self._ends[:-1]

    def _read_events(self) -> None:
        if self._events:
            self._events[-1].synchronize()
        while len(self._events) > 1:
            self._read_event()

    def _read_event(self) -> None:
        before = self._events.popleft()
        self._times.append(before.elapsed_time(self._events[0]) / 1000)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of ordered values that at least so many percent of them do not exceed."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


class Timer:
    """Tells when the seconds since the last checkpoint are over.

    rank 0's clock ── a flag in the reduction of the step ── all ranks save after the same step

    This is `checkpoint.every_s`. The clocks of ranks differ, so only that of rank 0 counts. As for
    a stop request, the flag is read after the step on the CPU, and after the next one on a GPU
    (see `Copied`).

    Without `every_s` it is the null form, which adds nothing to the reduction. The clock of one
    rank alone `decides`; it returns seconds that never decrease.
    """

    def __init__(
        self,
        every_s: float | None = None,
        *,
        decides: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._decides, self._clock = every_s, decides, clock
        self._since = clock()
        self._totals = Copied()

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction: nothing, or 1.0 when the time is over."""
        if self._every_s is None:
            return []
        return [float(self._decides and self._passed >= self._every_s)]

    def offer(self, totals: Numbers) -> None:
        """Store the reduced flags without waiting for the device."""
        if self._every_s is not None:
            self._totals.offer(totals)

    def is_due(self) -> bool:
        """Return whether the ranks have agreed that it is time; the same on every rank."""
        if self._every_s is None:
            return False
        return any(totals[0] > 0 for totals, _ in self._totals.take(late=True))

    def restart(self) -> None:
        """Count from now on, after what the timer was for."""
        self._since = self._clock()
        self._totals = Copied()  # a flag on its way asked for what was just done

    @property
    def _passed(self) -> float:
        return self._clock() - self._since


_PARTS = (
    *("startup", "compile", "compute", "communication", "data_wait"),
    *("checkpoint", "evaluation", "other", "slow_rank"),
)
# Other parts belong to the phase that they are in: a report to its step, hooks to what they follow.
_PHASES = {"startup": marks.START_UP, "evaluation": marks.EVALUATION, "checkpoint": marks.SAVE}


class Account:
    """The seconds of an attempt by part; it begins in the part `startup`.

    startup │ compute   compute   compute │ evaluation │ compute │ checkpoint │ ...
              └── of it: data_wait, communication, compile, as the meter finds them

    Every moment since the process began is in one part. They add up to the whole time, because one
    clock goes from part to part.

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
