"""The upload of metrics that are not in the journal: samples of the nodes, recorded evaluations.

    monitor/n01.jsonl ── system/n01/gpu_0_utilization_percentage ... ── MLflow's "System metrics"

Each value is stored once, however often the uploader is killed. For the samples, MLflow has a tag
with the position in each file, sent in the same batch as the values before it. The result of an
evaluation never changes, and MLflow ignores a point that it has already, also of another uploader.
See `hpctrain.monitor` and `hpctrain.tracking.recorded`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.tracking import recorded, samples
from hpctrain.tracking.uploading.mlrun import BATCH, MlflowRun, Point

_TAG = "hpctrain.system_metrics"
_MOST = BATCH - 2  # values that a batch has beside this tag and the position in the journal


class SystemMetrics:
    """The samples of all nodes; those before the node's position in its file are in the store.

    The `tags` of the run say where the upload was.
    """

    def __init__(self, run_dir: Path, tags: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self.positions: dict[str, int] = {}
        with suppress(ValueError, TypeError, AttributeError):  # somebody has edited the tag
            stored = json.loads(tags.get(_TAG, "{}"))
            self.positions = {str(node): int(position) for node, position in stored.items()}

    @property
    def is_new(self) -> bool:
        """Whether there are samples that are not uploaded."""
        return any(samples.new(self._run_dir, self.positions))

    def upload(self, run: MlflowRun, position: int) -> int:
        """Upload what is new, with the position of the journal; return the number of values."""
        batch: list[Point] = []
        ahead, count = dict(self.positions), 0
        for node, sample in samples.new(self._run_dir, self.positions):
            points = [*_points(node, sample)]
            if len(batch) + len(points) > _MOST and batch:
                self._send(run, batch, position, ahead)
                batch = []
            batch += points
            ahead[node] = sample.end
            count += len(points)
        if batch:
            self._send(run, batch, position, ahead)
        self.positions = ahead  # lines without values need not be stored
        return count

    def _send(
        self, run: MlflowRun, batch: list[Point], position: int, ahead: dict[str, int]
    ) -> None:
        run.log_points(batch, position, {_TAG: json.dumps(ahead)})
        self.positions = dict(ahead)


def _points(node: str, sample: samples.Sample) -> Iterator[Point]:
    for name, value in sample.metrics.items():
        yield Point(f"system/{node}/{name}", value, sample.time, sample.number)


class EvaluationMetrics:
    """The recorded evaluations of a run; `uploaded` are the steps that are in the store."""

    def __init__(self, run_dir: Path, uploaded: Iterable[int]) -> None:
        self._run_dir = run_dir
        self.uploaded = {*uploaded}

    @property
    def new(self) -> set[int]:
        """The steps of the results that are not uploaded."""
        return recorded.steps(self._run_dir) - self.uploaded

    def upload(self, run: MlflowRun, position: int) -> int:
        """Upload what is new, with the position of the journal; return the number of values."""
        new = self.new
        points = [*self._points(new)]
        for begin in range(0, len(points), BATCH):
            run.log_points(points[begin : begin + BATCH], position)
        self.uploaded |= new
        return len(points)

    def _points(self, steps: Iterable[int]) -> Iterator[Point]:
        for step in steps:
            if (found := recorded.read(self._run_dir, step)) is not None:
                for name, value in found.metrics.items():
                    yield Point(name, value, found.time, found.step)
