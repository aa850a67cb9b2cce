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
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.tracking import columns
from hpctrain.tracking.journal import JournalRecord, journal_path


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


@dataclass
class History:
    """What a journal tells."""

    metrics: dict[str, Series] = field(default_factory=dict)  # without superseded values
    # Where time went, in the order of the journal.
    times: list[TimeRecord] = field(default_factory=list)
    # Time and step of every record of metrics, also of superseded ones.
    reported: list[tuple[float, int]] = field(default_factory=list)
    # Times at which the run went back, and the step after which nothing counts any more.
    rewinds: list[tuple[float, int]] = field(default_factory=list)
    damaged: int = 0  # places that are no records
    # The steps at which an attempt after the first one has reported first.
    restarts: list[int] = field(default_factory=list)
    _end: int = 0  # of the records so far
    _attempt: int = 1
    _places: list[int] = field(default_factory=list)  # of the records of metrics
    data: dict[str, str] = field(default_factory=dict)  # by the name of the data set

    @classmethod
    def read(cls, run_dir: Path) -> History:
        """Read the journal of a run; it is empty where there is none.

        A last line that was cut off, and lines that are no records, are left out and counted.
        """
        history, path = cls(), journal_path(run_dir)
        steps, keys, values = columns.read(path, history._add)
        for step, key, value in zip(steps.tolist(), keys.tolist(), values.tolist(), strict=True):
            if (series := history.metrics.get(key)) is None:
                series = history.metrics[key] = Series()
            series.steps.append(step)
            series.values.append(value)
        with suppress(OSError):
            history.damaged += path.stat().st_size > history._end
        return history

    def _add(self, record: JournalRecord) -> None:
        """Note what a record tells besides its metrics."""
        self.damaged += record.start != self._end
        self._end = record.end
        body, kind = record.body, record.body["kind"]
        if kind == "metrics":
            step, attempt = body["step"], body["attempt"]
            self.reported.append((body["time"], step))
            if attempt > self._attempt:
                self._attempt = attempt
                self.restarts.append(step)
            self._places.append(record.start)
        elif kind == "time":
            self.times.append(TimeRecord(body["time"], body["step"], body["seconds"]))
        elif kind == "dataset":
            counts = ", ".join(f"{int(n):,} {split}" for split, n in body["samples"].items())
            self.data[str(body["name"])] = f"{body['source']} ({counts} samples)"
        elif kind == "superseded":
            before = bisect_left(self._places, int(body["from"]))
            kept = self.reported[before - 1][1] if before else 0
            self.rewinds.append((float(body["time"]), kept))

    def series(self, name: str) -> Series:
        """Return a metric; empty if the run has none of this name."""
        return self.metrics.get(name) or Series()
