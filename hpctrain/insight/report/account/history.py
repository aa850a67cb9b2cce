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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.tracking import journal
from hpctrain.tracking.journal import journal_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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

    def thinned(self, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return at most about `most` points: the extremes of each part, so that no peak is lost.

        A value that is not finite becomes NaN, a gap in the line; a part with one keeps one.
        """
        import numpy as np  # it takes longer to import than ten runs to read

        x, y = np.array(self.steps, np.float64), np.array(self.values, np.float64)
        y = np.where(np.isfinite(y), y, np.nan)
        if len(x) <= most:
            return x, y
        keep = []
        for begin, end in pairwise(np.linspace(0, len(y), most // 2 + 1).astype(int).tolist()):
            part, gaps = y[begin:end], np.flatnonzero(np.isnan(y[begin:end]))
            places = {*gaps[:1].tolist()}
            if len(gaps) < len(part):
                places |= {int(np.nanargmin(part)), int(np.nanargmax(part))}
            keep += sorted(begin + place for place in places)
        keep += [len(x) - 1] * (keep[-1] < len(x) - 1)  # the end of a curve stays
        return x[keep], y[keep]


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
        from hpctrain.tracking import columns  # with numpy

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
