"""How a sweep stands: how many of its runs have finished, and which is best.

    run.json, progress.json of a run ── Row ── a tag of the sweep's parent run in MLflow
                                                    │
                                  tags of the parent ── the rows of all runs that have begun

Each run writes its own row, so that runs that end at the same time do not overwrite each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import DamageError
from hpctrain.metric_names import better, main_metric
from hpctrain.record import Finite, decode
from hpctrain.run_record import Progress, RunRecord
from hpctrain.secrets import mask

PREFIX = "mlflow.hpctrain.sweep."  # MLflow's pages do not show tags that begin with `mlflow.`


@dataclass(frozen=True)
class Row:
    """One run of a sweep."""

    name: str  # its name in MLflow
    run_id: str  # MLflow's id of it
    status: str  # MLflow's, such as FINISHED
    metric: str = ""
    # The last value of the metric; None if there is none, or if it is not finite.
    value: Finite | None = None
    # Which values of the metric are better: "lower" or "higher"; "" if its name does not tell.
    better: str = ""

    @classmethod
    def of(cls, run_dir: Path, name: str, run_id: str, status: str) -> Row:
        """Return the row of a run; what its directory does not tell is left out."""
        record, progress = _known(run_dir), Progress()
        with suppress(DamageError):
            progress = Progress.of(run_dir)
        values = {**progress.metrics, **(record.result or {})}
        main = progress.metric
        metric = main_metric(main, {key for key in values if _number(values[key]) is not None})
        return cls(
            mask(name),
            run_id,
            status,
            metric,
            _number(values.get(metric)),
            better(metric) or "",
        )

    def text(self) -> str:
        """Return the row as the value of a tag."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Row | None:
        """Return the row of a tag; None if somebody has damaged it."""
        with suppress(DamageError):
            return decode(cls, text.encode(errors="replace"), PREFIX)
        return None


def asked_of(run_dir: Path) -> int:
    """Return how many runs the sweep of this run has; 0 if that is not known, as in a search."""
    asked = (_known(run_dir).sweep or {}).get("runs", "")
    return int(asked) if asked.isdecimal() else 0


def rows_in(tags: Mapping[str, str]) -> list[Row]:
    """Return the rows in the tags of the parent, the best run first, failed runs last."""
    found = [Row.parse(text) for key, text in tags.items() if key.startswith(PREFIX)]
    return sorted((row for row in found if row is not None), key=_rank)


def digest(rows: Sequence[Row]) -> str:
    """Return a text that differs when a row does."""
    return hashlib.sha256("\n".join(row.text() for row in rows).encode()).hexdigest()[:16]


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the best run: of the finished ones, or else of those that have not failed."""
    for group in (("FINISHED",), ("RUNNING", "KILLED", "SCHEDULED")):
        for row in rows:  # they are sorted
            if row.status in group and row.value is not None and row.better:
                return row
    return None


def tags(rows: Sequence[Row], asked: int) -> dict[str, str]:
    """Return the tags of the parent that people see, and by which they can search."""
    best = best_of(rows)
    return {
        "hpctrain.sweep.state": state(rows, asked),
        "hpctrain.sweep.best": f"{best.name}: {best.metric} {_shown(best.value)}" if best else "",
        "hpctrain.sweep.best_run_id": best.run_id if best else "",
    }


def state(rows: Sequence[Row], asked: int) -> str:
    """Return how many runs are finished, failed and so on: `5 of 8 finished, 1 failed`."""
    count = {status: sum(row.status == status for row in rows) for status in _WORDS}
    total = max(asked, len(rows))
    count["QUEUED"] += total - len(rows)
    words = [f"{count.pop('FINISHED')} of {total} finished"]
    words += [f"{number} {_WORDS[status]}" for status, number in count.items() if number]
    return ", ".join(words)


_WORDS = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
    "RUNNING": "running",
    "SCHEDULED": "paused",
    "QUEUED": "not begun",
}


def _rank(row: Row) -> tuple[int, float, str]:
    """Return the place of a row: comparable values first, the best of them at the top."""
    group = 2 if row.status == "FAILED" else 0 if row.value is not None and row.better else 1
    value = row.value or 0.0
    return group, -value if row.better == "higher" else value, row.name


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if good and isinstance(value, int | float) else None


def _known(run_dir: Path) -> RunRecord:
    with suppress(DamageError):
        return RunRecord.of(run_dir)
    return RunRecord()
