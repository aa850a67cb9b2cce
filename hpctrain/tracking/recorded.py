"""Results of evaluations that 0.2.0 has recorded: `evaluations/recorded/step-00000200.json`.

    {"version": 1, "step": 200, "time": 1.7e9, "metrics": {"val/loss": 0.31},
     "checkpoint": "xxh3_128:…"}

This version writes none.
"""

from pathlib import Path
from typing import NamedTuple

from hpctrain.base.files.record import Count, Number, Record, Time, read_known
from hpctrain.base.names.step_names import of_steps, step_name, step_of


class Recorded(NamedTuple):
    """The result of one evaluation."""

    step: int  # the global step of the checkpoint
    # The values by the names that the training's own evaluation gives them.
    metrics: dict[str, float]


class _File(Record, frozen=True):
    VERSION = 1

    step: Count
    time: Time
    metrics: dict[str, Number]


def steps(run_dir: Path) -> set[int]:
    """Return the steps of the checkpoints that have a result."""
    return set(map(step_of, of_steps(_folder(run_dir), ".json")))


def read(run_dir: Path, step: int) -> Recorded | None:
    """Return the result of a checkpoint; None if there is none."""
    body = read_known(_File, _folder(run_dir) / f"{step_name(step)}.json", parts=3)
    if body is None:
        return None
    return Recorded(body.step, {name: float(value) for name, value in body.metrics.items()})


def read_all(run_dir: Path) -> list[Recorded]:
    """Return all results, in the order of their steps; a damaged file is left out."""
    found = (read(run_dir, step) for step in sorted(steps(run_dir)))
    return [each for each in found if each is not None]


def _folder(run_dir: Path) -> Path:
    return run_dir / "evaluations" / "recorded"
