"""The upload of metrics that are not in the journal: samples of the nodes, recorded evaluations.

    monitor/n01.jsonl ── system/n01/gpu_0_utilization_percentage ... ── MLflow's "System metrics"

Each value is stored once, however often the uploader is killed. For the samples, MLflow has a tag
with the position in each file, sent in the same batch as the values before it. The result of an
evaluation never changes, and MLflow ignores a point that it has already, also of another uploader.
See `hpctrain.monitor` and `hpctrain.tracking.recorded`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpctrain.tracking import recorded, samples
from hpctrain.tracking.uploading.mlrun import BATCH, MlflowRun, Point

_TAG = "hpctrain.system_metrics"
_MOST = BATCH - 2  # values that a batch has beside this tag and the position in the journal


class SystemMetrics:
    """The samples of all nodes; those before the node's position in its file are in the store."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.positions: dict[str, int] = {}

    def begin(self, tags: Mapping[str, str]) -> None:
        """Go on where the store says that the upload was."""
        try:
            stored = json.loads(tags.get(_TAG, "{}"))
            self.positions = {str(node): int(position) for node, position in stored.items()}
        except (ValueError, TypeError, AttributeError):  # somebody has edited the tag
            self.positions = {}

    @property
    def is_new(self) -> bool:
        """Whether there are samples that are not uploaded."""
        return samples.has_new(self._run_dir, self.positions)

    def upload(self, run: MlflowRun, position: int) -> int:
        """Upload what is new, with the position of the journal; return the number of values."""
        batch: list[Point] = []
        ahead, count = dict(self.positions), 0
        for node, path in samples.files(self._run_dir).items():
            for sample in samples.read(path, self.positions.get(node, 0)):
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

    def all_points(self) -> Iterator[Point]:
        """Yield the values of all samples that were uploaded."""
        for node, path in samples.files(self._run_dir).items():
            for sample in samples.read(path):
                if sample.end <= self.positions.get(node, 0):
                    yield from _points(node, sample)

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
