"""Which checkpoint of a run is meant: the newest, that of a step, or the best."""

import math
from pathlib import Path

from hpctrain.base.names.run_record import BestValue, RunRecord
from hpctrain.base.names.step_names import step_name, step_of
from hpctrain.errors import StorageError
from hpctrain.runs.checkpoints.manifest import checkpoints, damage, newest_intact
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import recorded


def best_of(path: Path, record: RunRecord) -> BestValue | None:
    """Return the metric, value and step of the best checkpoint of a run; None without one.

    The training notes it in run.json. Where an older version had evaluations in jobs of their own,
    it follows from their results: of the checkpoints that are there, it is the one with the best
    value, and of equal ones the first.
    """
    followed = record.best_by_jobs
    if followed is None:
        return record.best
    metric, sign = followed.metric, 1 if followed.lower else -1
    values = [
        (sign * one.metrics[metric], one.step)
        for one in recorded.read_all(path)
        if math.isfinite(one.metrics.get(metric, math.nan))
        and (path / "checkpoints" / step_name(one.step)).is_dir()
    ]
    if not values:
        return None
    value, step = min(values)
    return BestValue(metric=metric, value=sign * value, step=step)


def best_step(path: Path, record: RunRecord) -> int:
    """Return the step of the best checkpoint; 0 without one. See `best_of`."""
    best = best_of(path, record)
    return best.step if best else 0


def chosen_checkpoint(run: RunDir, step: int | None = None, *, best: bool = False) -> Path:
    """Return the folder of a checkpoint whose digests are verified, or raise a StorageError.

    It is that of a step, or the `best` of run.json, or without both the newest one that is intact.
    """
    if best:
        known = best_of(run.path, run.read())
        if known is None:
            raise StorageError(
                f"{run.path}: the run has no best checkpoint; checkpoint.best=val/loss keeps one"
            )
        step = known.step
    if step is None:
        checkpoint = newest_intact(run.checkpoints)
    else:
        checkpoint = run.checkpoints / step_name(step)
        if checkpoint.is_dir() and (problem := damage(checkpoint)):
            raise StorageError(f"{checkpoint} is not intact: {problem}")
    if checkpoint is None or not checkpoint.is_dir():
        steps = sorted(map(step_of, checkpoints(run.checkpoints)))
        listed = ", ".join(map(str, steps)) or "none"
        which = "no checkpoint" + ("" if step is None else f" of step {step}")
        raise StorageError(f"{run.path}: {which}; there are: {listed}")
    return checkpoint
