"""How long each step took, from the end of the step before to its own end.

    begin ── step ── step ── pause ── begin ── step        three times

On a GPU the host runs ahead of the device. So events mark the ends of the steps in the stream of
the training, and the times are those between the events; the host does not wait for them.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from operator import sub

import torch

_PENDING = 256  # events; beyond that, those that have passed are read at each step


class StepTimes:
    """The times of the steps since the last `take`."""

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
