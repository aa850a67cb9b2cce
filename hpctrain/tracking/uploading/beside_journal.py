"""The upload of metrics that are not in the journal: the samples of the nodes.

    monitor/n01.jsonl ── system/n01/gpu_0_utilization_percentage ... ── MLflow's "System metrics"

Each value is stored once, however often the uploader is killed: MLflow has a tag with the position
in each file, sent in the same batch as the values before it. See `hpctrain.insight.monitor`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.tracking import samples
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
