"""What the monitors of the nodes have written, which is not in the journal: metrics and tags.

    monitor/n01.jsonl ── system/n01/gpu_0_utilization_percentage ... ── MLflow's "System metrics"
                      ── hpctrain.node.n01  driver=570.1, gpu_0=NVIDIA H100, kernel=6.8.0
    monitor/n01.idle  ── hpctrain.idle      n01: gpu_0 below 5% for 30 minutes

Each value is stored once, however often the uploader is killed: MLflow has a tag with the position
in each file, sent in the same batch as the values before it. See `hpctrain.insight.monitor`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.base.names.run_record import Hang
from hpctrain.base.secrets import mask
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
            points = [
                Point(f"system/{node}/{name}", value, sample.time, sample.number)
                for name, value in sample.metrics.items()
            ]
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


_MOST_NODES = 64


class Nodes:
    """The nodes of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._facts: dict[str, Mapping[str, str]] = {}  # the newest of each node
        self._read: dict[str, int] = {}
        self._tags: dict[str, str] = {}

    def new_tags(self) -> dict[str, str]:
        """Return the tags that this object has not returned before, with these values."""
        for node, sample in samples.new(self._run_dir, self._read):
            self._read[node] = sample.end
            if sample.facts:
                self._facts[node] = sample.facts
        found = {
            f"hpctrain.node.{node}": ", ".join(f"{name}={value}" for name, value in facts.items())
            for node, facts in [*self._facts.items()][:_MOST_NODES]
        }
        if idle := "; ".join(text for _, text in samples.idle(self._run_dir).values()):
            found["hpctrain.idle"] = idle
        if hang := Hang.get(self._run_dir):
            found["hpctrain.hang"] = hang.sentence
        found = {key: mask(value) for key, value in found.items()}
        new = {key: value for key, value in found.items() if self._tags.get(key) != value}
        self._tags |= new
        return new
