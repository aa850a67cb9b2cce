"""Results of `evaluate --record`: `evaluations/recorded/step-00000200.json`.

    {"version": 1, "step": 200, "time": 1.7e9, "metrics": {"val/loss": 0.31},
     "checkpoint": "xxh3_128:…"}

A file is created whole, once, and never changes: the first result of a checkpoint counts, however
often it is evaluated. So the run's journal keeps its single writer, and a result that is uploaded
twice is the same point in MLflow.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from hpctrain import disk
from hpctrain.record import Count, Number, Record, Time, read_known, written
from hpctrain.step_names import of_steps, step_name, step_of
from hpctrain.tracking.journal_line import encode


class Recorded(NamedTuple):
    """The result of one evaluation."""

    step: int  # the global step of the checkpoint
    time: float  # when it was evaluated, in seconds since the epoch
    # The values by the names that the training's own evaluation gives them.
    metrics: dict[str, float]


class _File(Record, frozen=True):
    VERSION = 1

    step: Count
    time: Time
    metrics: dict[str, Number]
    checkpoint: str = ""


def record(run_dir: Path, step: int, metrics: Mapping[str, float], checkpoint: str) -> Recorded:
    """Write the result of a checkpoint, unless it has one; return the one that counts."""
    path = _path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = cast("dict[str, Number]", {name: encode(x) for name, x in metrics.items()})
    body = _File(step, round(time.time(), 3), values, checkpoint)
    text = written(body)
    if not disk.create(path, text) and not path.exists():  # a file system without hard links
        disk.write_atomically(path, text)
    found = read(run_dir, step)
    if found is None:
        raise OSError(f"{path} is damaged")
    return found


def copy(source: Path, target: Path, step: int) -> None:
    """Copy the result of a checkpoint from one run directory to another one, as it is."""
    path = _path(target, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(path, disk.text_of(_path(source, step), parts=3))


def steps(run_dir: Path) -> set[int]:
    """Return the steps of the checkpoints that have a result."""
    return set(map(step_of, of_steps(_folder(run_dir), ".json")))


def read(run_dir: Path, step: int) -> Recorded | None:
    """Return the result of a checkpoint; None if there is none."""
    body = read_known(_File, _path(run_dir, step), parts=3)
    if body is None:
        return None
    values = {name: float(value) for name, value in body.metrics.items()}
    return Recorded(body.step, body.time, values)


def read_all(run_dir: Path) -> list[Recorded]:
    """Return all results, in the order of their steps; a damaged file is left out."""
    found = (read(run_dir, step) for step in sorted(steps(run_dir)))
    return [each for each in found if each is not None]


def _folder(run_dir: Path) -> Path:
    return run_dir / "evaluations" / "recorded"


def _path(run_dir: Path, step: int) -> Path:
    return _folder(run_dir) / f"{step_name(step)}.json"
