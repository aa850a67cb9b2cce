"""The upload of evaluations that are not the training's own; see `hpctrain.tracking.recorded`.

A result never changes, and MLflow ignores a point that it has already. So each value is stored
once, however often the uploader is killed, and also when two of them are at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hpctrain.tracking import recorded
from hpctrain.tracking.uploading.mlrun import BATCH, MlflowRun, Point


class EvaluationMetrics:
    """The recorded evaluations of a run; `uploaded` are the steps that are in the store."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.uploaded: set[int] = set()

    def begin(self, uploaded: Iterable[int]) -> None:
        """Go on after an uploader that has left these steps in the store."""
        self.uploaded = {*uploaded}

    @property
    def is_new(self) -> bool:
        """Whether there are results that are not uploaded."""
        return bool(self._new())

    def upload(self, run: MlflowRun, position: int) -> int:
        """Upload what is new, with the position of the journal; return the number of values."""
        new = self._new()
        points = [point for step in new for point in self._points(step)]
        for begin in range(0, len(points), BATCH):
            run.log_points(points[begin : begin + BATCH], position)
        self.uploaded |= new
        return len(points)

    def all_points(self) -> Iterator[Point]:
        """Yield the values of all results that were uploaded."""
        for step in sorted(self.uploaded):
            yield from self._points(step)

    def _new(self) -> set[int]:
        return recorded.steps(self._run_dir) - self.uploaded

    def _points(self, step: int) -> Iterator[Point]:
        if (found := recorded.read(self._run_dir, step)) is not None:
            for name, value in found.metrics.items():
                yield Point(name, value, found.time, found.step)
