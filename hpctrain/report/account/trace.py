"""A trace of torch's profiler: the top operators, and how much communication work covers.

What is communication is told by where it runs, not by the names of kernels:

    GPU   the streams on which an event carries the name of a collective operation
    CPU   the threads that run no operator of torch, only what the backend annotates (gloo)

An operator's time is its own, without that of the operators inside of it.
"""

import gzip
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.disk import open_regular
from hpctrain.errors import DamageError
from hpctrain.record import Finite, Record, decode

_FILE = re.compile(r"steps-(\d+)-(\d+)\.rank(\d+)\.json\.gz")
_MOST = 8
_LARGEST = 512 << 20  # bytes of a trace that is unpacked
_MICRO = 1e-6


class _Event(Record, frozen=True):
    """What a trace has of each event that is told apart here."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Finite = 0.0  # microseconds
    dur: Finite = 0.0
    args: dict[str, Any] | None = None


class _File(Record, frozen=True):
    traceEvents: tuple[_Event, ...]


@dataclass
class _Trace:
    """What a trace of the steps `first` to `last` says.

    Operators have a name, own seconds and calls; `covered_s` are the seconds of the communication
    in which something was computed, too.
    """

    rank: int
    first: int
    last: int
    operators: list[tuple[str, float, int]] = field(default_factory=list)
    communication_s: float = 0.0
    covered_s: float = 0.0

    def lines(self) -> list[str]:
        """Return the trace in words."""
        steps = self.last - self.first + 1
        found = [
            f"rank {self.rank}, steps {self.first} to {self.last}: {name} {1000 * own / steps:.3g} "
            f"ms of a step ({calls / steps:.3g} calls)"
            for name, own, calls in self.operators
        ]
        if self.communication_s:
            share = 100 * self.covered_s / self.communication_s
            found.append(
                f"rank {self.rank}: {1000 * self.communication_s / steps:.3g} ms of communication "
                f"in a step, {share:.0f}% of it covered by computation"
            )
        return found


def traces(run_dir: Path, left_out: list[str]) -> list[_Trace]:
    """Read the traces of a run; `left_out` gets a line for each that says nothing."""
    found = []
    for path in sorted((run_dir / "profile").glob("*.json.gz")):
        if name := _FILE.fullmatch(path.name):
            first, last, rank = map(int, name.groups())
            try:
                trace = _read(path, _Trace(rank, first, last))
            except (OSError, EOFError, zlib.error, DamageError) as error:
                left_out.append(f"{path}: no trace of torch's profiler ({error})")
                continue
            if trace.operators:
                found.append(trace)
            else:
                left_out.append(f"{path}: a trace without operators, so without steps")
    return found


def _read(path: Path, trace: _Trace) -> _Trace:
    with open_regular(path, parts=2) as packed, gzip.open(packed) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise DamageError(path, f"it unpacks to more than {_LARGEST >> 20} MiB")
    events = [event for event in decode(_File, text, path).traceEvents if event.ph == "X"]
    on_gpu = [each for each in events if each.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    lanes: dict[Any, list[_Event]] = defaultdict(list)
    if on_gpu:
        for event in on_gpu:
            lanes[event.pid, event.tid].append(event)
        talks = {
            k for k, lane in lanes.items() if any("Collective name" in (e.args or ()) for e in lane)
        }
    else:
        for event in events:
            if event.cat in ("cpu_op", "user_annotation"):
                lanes[event.tid].append(event)
        talks = {k for k, lane in lanes.items() if all(e.cat != "cpu_op" for e in lane)}
    work = [event for key, lane in lanes.items() if key not in talks for event in lane]
    if not on_gpu:
        work = [event for event in work if event.cat == "cpu_op"]
    talk = [event for key in talks for event in lanes[key]]
    own: dict[str, list[float]] = defaultdict(list)
    for name, seconds in _own_times(work):
        own[name].append(seconds)
    totals = [(name, sum(each), len(each)) for name, each in own.items()]
    trace.operators = sorted(totals, key=lambda each: -each[1])[:_MOST]
    trace.communication_s = _seconds(talk)
    trace.covered_s = trace.communication_s + _seconds(work) - _seconds(talk + work)
    return trace


def _span(event: _Event) -> tuple[float, float]:
    begin = event.ts * _MICRO
    return begin, begin + event.dur * _MICRO


def _own_times(events: Iterable[_Event]) -> Iterable[tuple[str, float]]:
    """Yield the name of each event and its seconds without those of the events inside of it."""
    lanes: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        begin, end = _span(event)
        lanes[event.pid, event.tid].append((begin, -end, event.name))
    for lane in lanes.values():
        stack: list[list[Any]] = []  # end, name, own seconds
        for begin, minus_end, name in sorted(lane):
            while stack and stack[-1][0] <= begin:
                _, done, seconds = stack.pop()
                yield done, seconds
            if stack:
                stack[-1][2] -= -minus_end - begin
            stack.append([-minus_end, name, -minus_end - begin])
        for _, done, seconds in stack:
            yield done, seconds


def _seconds(events: Iterable[_Event]) -> float:
    """Return the seconds in which there is at least one of the events."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(map(_span, events)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
