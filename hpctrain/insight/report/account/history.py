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
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hpctrain.tracking import journal
from hpctrain.tracking.journal import journal_path


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


class TimeRecord(NamedTuple):
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

    path: Path  # of the journal
    # Where time went, in the order of the journal.
    times: list[TimeRecord] = field(default_factory=list)
    # Time and step of every record of metrics, also of superseded ones.
    reported: list[tuple[float, int]] = field(default_factory=list)
    # Times at which the run went back, and the step after which nothing counts any more.
    rewinds: list[tuple[float, int]] = field(default_factory=list)
    damaged: int = 0  # places that are no records
    # The steps at which an attempt after the first one has reported first.
    restarts: list[int] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)  # by the name of the data set

    @classmethod
    def read(cls, run_dir: Path) -> History:
        """Read the journal of a run; it is empty where there is none.

        A last line that was cut off, and lines that are no records, are left out and counted.
        """
        history, place, attempt = cls(journal_path(run_dir)), 0, 1
        places = list[int]()  # of the records of metrics
        for begin, end, body in journal.outlines(history.path):
            history.damaged += begin != place
            place = end
            if body.kind == "metrics":
                history.reported.append((body.time, body.step))
                if body.attempt > attempt:
                    attempt = body.attempt
                    history.restarts.append(body.step)
                places.append(begin)
            elif body.kind == "time":
                history.times.append(TimeRecord(body.time, body.step, body.seconds))
            elif body.kind == "dataset":
                counts = ", ".join(f"{n:,} {split}" for split, n in body.samples.items())
                history.data[body.name] = f"{body.source} ({counts} samples)"
            elif body.kind == "superseded":
                before = bisect_left(places, body.begin)
                kept = history.reported[before - 1][1] if before else 0
                history.rewinds.append((body.time, kept))
        with suppress(OSError):
            history.damaged += history.path.stat().st_size > place
        return history

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """The metrics by name, without superseded values; they are read when they are needed."""
        from hpctrain.results import columns  # numpy takes longer to import than ten runs to read

        found: dict[str, Series] = {}
        steps, keys, values = columns.read(self.path)
        for step, key, value in zip(steps.tolist(), keys.tolist(), values.tolist(), strict=True):
            if (series := found.get(key)) is None:
                series = found[key] = Series()
            series.steps.append(step)
            series.values.append(value)
        return found

    def series(self, name: str) -> Series:
        """Return a metric; empty if the run has none of this name."""
        return self.metrics.get(name) or Series()
