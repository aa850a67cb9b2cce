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
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.units import GIB
from hpctrain.config.frozen import load
from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.schema import Config
from hpctrain.tracking.journal import journal_path, read_all

ENOUGH_STEPS = 20
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
