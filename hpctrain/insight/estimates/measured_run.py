"""What a run has measured of itself, for the forecasts of others: times of steps and the rest.

run.json    ── ranks, nodes, hosts
config.yaml ── model, batch, layout            ──┐
journal     ── perf/step_ms_p50, perf/..., time ─┴── MeasuredRun

The first report of each attempt is left out: its steps compile, allocate and connect. So are the
steps of train.batch_size_ramp, whose batches are smaller.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from hpctrain.base.files.disk import text_of
from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.units import GIB
from hpctrain.config.frozen import dump, load
from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.tracking.journal import journal_path, read_all

ENOUGH_STEPS = 20
_MOST_RUNS = 200  # the newest of `output_dir`; their names are read once for a sweep
_PAUSES = {"perf/evaluation_s", "perf/checkpoint_s"}
_OF_STEPS = {
    *("perf/step_ms_p50", "perf/samples_per_s", "perf/mfu_percent", "perf/memory_peak_gib"),
}


@dataclass(frozen=True)
class MeasuredRun:
    """A run with enough steps."""

    path: Path
    ranks: int  # of its last attempt
    parameters: int | None  # of the model; None if unknown
    steps: int  # that count for the times below
    step_s: float  # median, with the wait for data
    mean_step_s: float
    mfu: float | None  # as a part of the peak; None if unknown
    peak_bytes: int | None  # of tensors on a GPU; None on CPUs
    startup_s: float  # from the begin of an attempt to its first step, with compilation
    evaluation_s: float  # of one; 0 if there was none
    checkpoint_s: float  # of one, as the training feels it; 0 if there was none
    samples_per_epoch: int | None  # rounded to whole steps

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.path.name} ({self.steps} steps of {self.step_s:.4g} s on {ranks})"


@functools.lru_cache(maxsize=256)
def frozen(run: Path) -> Config:
    """Return the config of a run."""
    return load(run / "config.yaml")


@functools.lru_cache(maxsize=256)
def measured_run(path: Path) -> MeasuredRun | None:
    """Return what a run has measured; None if it has too few steps after its first report."""
    record, train = RunRecord.of(path), frozen(path).train
    told = _Told(path, sum(steps for _, steps in ramp_of(train).stages))
    if not record.attempts or told.steps < ENOUGH_STEPS:
        return None
    batch, steps = (told.number(f"effective.{n}") for n in ("global_batch_size", "steps_per_epoch"))
    parameters = told.number("effective.parameters")
    peak, mfu = told.median("perf/memory_peak_gib"), told.median("perf/mfu_percent")
    return MeasuredRun(
        path=path,
        ranks=record.attempt.world_size,
        parameters=None if parameters is None else int(parameters),
        steps=told.steps,
        step_s=(told.median("perf/step_ms_p50") or math.nan) / 1000,
        mean_step_s=train.global_batch_size / (told.median("perf/samples_per_s") or math.nan),
        mfu=None if mfu is None else mfu / 100,
        peak_bytes=None if peak is None else int(peak * GIB),
        startup_s=told.startup_s,
        evaluation_s=told.median("perf/evaluation_s") or 0.0,
        checkpoint_s=told.median("perf/checkpoint_s") or 0.0,
        samples_per_epoch=int(batch * steps) if batch and steps else None,
    )


def runs_of_model(model: Mapping[str, Any], output_dir: str) -> Iterator[MeasuredRun]:
    """Yield the runs with enough steps in a folder whose section `model` is the same, newest first.

    The path of the folder is absolute.
    """
    candidates = _candidates(output_dir)
    wanted = _model(dump(Config(model={**model}))) if candidates else ""
    for path, text in candidates:
        if text == wanted:
            try:
                found = measured_run(path)
            except (HpctrainError, OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # it is damaged
            if found is not None:
                yield found


@functools.lru_cache(maxsize=16)
def _candidates(output_dir: str) -> tuple[tuple[Path, str], ...]:
    """Return the newest runs that have a journal, each with the text of its model."""
    journals = Path(output_dir).glob("*/journal/events.jsonl")
    newest = [file.parents[1] for file in nlargest(_MOST_RUNS, journals, key=_changed)]
    return tuple((path, _model(text_of(path / "config.yaml"))) for path in newest)


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _model(text: str) -> str:
    """Return the section `model` of a frozen config, which has the same text for the same model."""
    found = re.search(r"^model:.*\n([ -].*\n)*", text, re.MULTILINE)
    return found[0] if found else ""


class _Told:
    """What the journal of a run tells; its first `ramp` steps, of other batches, do not count."""

    def __init__(self, path: Path, ramp: int) -> None:
        self.params: dict[str, str] = {}
        self.steps, self.startup_s = 0, 0.0
        self._values: dict[str, list[float]] = defaultdict(list)
        before: tuple[int, int] | None = None  # the attempt and the step of the last report
        for body in (record.body for record in read_all(journal_path(path))):
            if body["kind"] == "params":
                self.params |= body["params"]
            elif body["kind"] == "time":
                seconds = body["seconds"]
                started = seconds.get("startup", 0.0) + seconds.get("compile", 0.0)
                self.startup_s = max(self.startup_s, started)
            elif body["kind"] == "metrics":
                keys = _PAUSES
                if "perf/step_ms_p50" in body["metrics"]:
                    attempt, step = int(body["attempt"]), int(body["step"])
                    if before is not None and before[0] == attempt and before[1] >= ramp:
                        self.steps += max(0, step - before[1])
                        keys = _PAUSES | _OF_STEPS
                    before = attempt, step
                for key in keys & body["metrics"].keys():
                    self._values[key].append(float(body["metrics"][key]))

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the reports; None if there is none."""
        finite = [value for value in self._values[key] if math.isfinite(value)]
        return statistics.median(finite) if finite else None

    def number(self, key: str) -> float | None:
        """Return a param as a number; None if there is none."""
        try:
            return float(self.params[key])
        except (KeyError, ValueError):
            return None
