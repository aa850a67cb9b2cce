"""The clocks of a run: where its seconds go, and how long each step took."""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

import torch

from hpctrain.base.processes import marks
from hpctrain.base.processes.child import Process

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
    ticks = Process.current().started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


class WorkClock:
    """The seconds that the thread which makes it has been on a core, or has waited for one."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without it
            self._fd = -1

    def __call__(self) -> float:
        """Return them; the file stays open, because opening it takes ten times as long."""
        if self._fd < 0:
            return time.clock_gettime(self._clock)
        on_core, waiting, _ = os.pread(self._fd, 64, 0).split()
        return (int(on_core) + int(waiting)) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Interval(NamedTuple):
    """What a rank has measured since the last log step."""

    trained_s: float  # the time of the steps, without evaluations and checkpoints
    worked_s: float  # the work of the main thread in this time
    waited_s: float  # the seconds of it in which this rank has waited for its data
    # The peaks of the GPU's memory in bytes: what tensors needed, and what was reserved.
    memory: tuple[float, float] = (0.0, 0.0)
