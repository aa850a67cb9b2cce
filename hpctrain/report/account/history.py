"""The journal of a run as series: its metrics without what was superseded, and where time went.

metrics, step 200   ─┐
metrics, step 220    ├── superseded: the run was killed, and resumed from step 200
superseded           ┘
metrics, step 220   ─── Series("train/loss").values
time, step 220      ─── TimeRecord: the seconds of this attempt by part, until now
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.tracking import recorded
from hpctrain.tracking.journal import Record, journal_path, read_all

# What a record of other types than ours raises; it is left out like a damaged line.
_OTHER_TYPES = (TypeError, ValueError, KeyError, AttributeError, OverflowError)


@dataclass
class Series:
    """One metric over the steps, in the order of the journal."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def last(self) -> float:
        """Return the last value; NaN without one."""
        return self.values[-1] if self.values else math.nan

    def finite(self) -> list[float]:
        """Return the finite values."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class TimeRecord:
    """Where the time of an attempt went until this record, in seconds since its process began."""

    time: float
    step: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """All seconds since the process of the attempt began."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class _Rewind:
    """The run went back: what was made after `step` until `time` does not count any more."""

    time: float
    step: int
    reached: int


@dataclass
class History:
    """What a journal tells.

    Attributes:
        metrics: The series by name, without superseded values.
        times: The records of where time went, in the order of the journal.
        reported: The time and the step of every record of metrics, superseded ones included.
        rewinds: Where the run went back to an earlier step.
        damaged: The places in the journal that are no records.
        restarts: The steps at which an attempt after the first one has reported first.
        data: What is said about each data set, by its name.
    """

    metrics: dict[str, Series] = field(default_factory=dict)
    times: list[TimeRecord] = field(default_factory=list)
    reported: list[tuple[float, int]] = field(default_factory=list)
    rewinds: list[_Rewind] = field(default_factory=list)
    damaged: int = 0
    restarts: list[int] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> History:
        """Read the journal of a run; it is empty where there is none.

        A last line that was cut off, and lines that are no records, are left out and counted.
        """
        path = journal_path(run_dir)
        history, raw = cls(), _Raw()
        end = 0
        try:
            for record in read_all(path):
                history.damaged += record.start != end
                end = record.end
                try:
                    raw.add(record, history)
                except _OTHER_TYPES:
                    history.damaged += 1
            history.damaged += path.stat().st_size > end
        except OSError:
            pass
        raw.finish(history)
        for evaluated in recorded.read_all(run_dir):
            for name, value in evaluated.metrics.items():
                series = history.metrics.setdefault(name, Series())
                series.values.append(value)
                series.steps.append(evaluated.step)
        return history

    def series(self, name: str) -> Series:
        """Return a metric; empty if the run has none of this name."""
        return self.metrics.get(name) or Series()


class _Raw:
    """The records of metrics until it is known which of them are superseded."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.steps: list[int] = []
        self.values: list[dict[str, Any]] = []
        self.superseded: list[tuple[int, int]] = []
        self.attempt = 1

    def add(self, record: Record, history: History) -> None:
        body = record.body
        kind = body["kind"]
        if kind == "metrics":
            step, time, values = int(body["step"]), float(body["time"]), body["metrics"]
            if not isinstance(values, dict):
                raise TypeError("metrics")
            self.starts.append(record.start)
            self.steps.append(step)
            self.values.append(values)
            history.reported.append((time, step))
            if int(body.get("attempt", 1)) > self.attempt:
                self.attempt = int(body["attempt"])
                history.restarts.append(step)
        elif kind == "time":
            seconds = {str(part): float(value) for part, value in body["seconds"].items()}
            history.times.append(TimeRecord(float(body["time"]), int(body["step"]), seconds))
        elif kind == "dataset":
            counts = ", ".join(f"{int(n):,} {split}" for split, n in body["samples"].items())
            history.data[str(body["name"])] = f"{body['source']} ({counts} samples)"
        elif kind == "superseded":
            begin, end = int(body["from"]), int(body["to"])
            self.superseded.append((begin, end))
            before = bisect_left(self.starts, begin)
            kept = self.steps[before - 1] if before else 0
            reached = max(self.steps[before:], default=kept)
            history.rewinds.append(_Rewind(float(body["time"]), kept, reached))

    def finish(self, history: History) -> None:
        ranges = _merged(self.superseded)
        begins = [begin for begin, _ in ranges]
        series = history.metrics
        for start, step, values in zip(self.starts, self.steps, self.values, strict=True):
            if ranges:
                place = bisect_right(begins, start) - 1
                if place >= 0 and start < ranges[place][1]:
                    continue
            for name, value in values.items():
                found = series.get(name)
                if found is None:
                    found = series[name] = Series()
                try:
                    found.values.append(float(value))
                except (TypeError, ValueError):
                    history.damaged += 1
                    continue
                found.steps.append(step)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, overlapping ones as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
