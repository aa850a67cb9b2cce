"""Trackers beside MLflow: what they get in a run that is resumed, and what their faults cost."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.trackers import OtherTracker, TensorBoard, WeightsAndBiases
from hpctrain.trackers.several import SeveralTrackers
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker
from tests.conftest import Completed, journal_metrics, runs

Train = Callable[..., Completed]


class Recorder(OtherTracker):
    """A tracker of a user, which notes what it was told."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[Any] = []
        self._fails = fails

    def start(self, params: Any, tags: Any) -> None:
        self.seen.append(("start", params, self.run_dir.name, self.run_name, self.uid))

    def rewind_to(self, step: int, logged: Any) -> None:
        self.seen.append(("rewind_to", step, dict(logged)))

    def log_metrics(self, metrics: Any, step: int) -> None:
        if self._fails:
            raise OSError("the disk of the tracker is full")
        self.seen.append((step, dict(metrics)))

    def finish(self, status: Any = "", *_: Any, **__: Any) -> None:
        self.seen.append(status)


def attempt(
    run: Path, others: list[OtherTracker], position: int, steps: range, value: float
) -> list[int]:
    """Log steps as an attempt that goes on at a position; return the position at each step."""
    meta = Meta("http://127.0.0.1:9", "exp", "n lr=1", "u")
    journal = JournalTracker(run, meta, upload=False)
    tracker = SeveralTrackers(journal, others, run, "n lr=1", "u")
    tracker.start({"optimizer": {"lr": 1}}, {"a": "b"})
    tracker.rewind(position)
    positions = []
    for step in steps:
        tracker.log_metrics({"loss": value + step, **({"val": value} if step % 2 else {})}, step)
        positions.append(tracker.position())
    tracker.sync()
    tracker.finish("FINISHED")
    return positions


def points_in(folder: Path, key: str) -> list[tuple[int, float]]:
    """Return the points that TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(each.step, each.value) for each in found.Scalars(key)]


def test_a_resumed_run_has_each_point_once_and_a_tracker_that_fails_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "r"
    positions = attempt(run, [TensorBoard(), Recorder()], 0, range(1, 7), 0.0)
    broken, good = Recorder(fails=True), Recorder()
    attempt(run, [TensorBoard(), broken, good], positions[3], range(5, 9), 100.0)

    assert good.seen == [
        ("start", {"optimizer.lr": "1"}, "r", "n lr=1", "u"),
        ("rewind_to", 5, {"loss": 6, "val": 5}),
        *[
            (step, {"loss": 100.0 + step} | ({"val": 100.0} if step % 2 else {}))
            for step in range(5, 9)
        ],
        "FINISHED",
    ]
    assert broken.seen == good.seen[:2]
    assert caplog.text.count("Recorder: OSError: the disk of the tracker is full") == 1
    wanted = [(step, float(step)) for step in range(1, 5)]
    wanted += [(step, 100.0 + step) for step in range(5, 9)]
    assert points_in(run / "tensorboard", "loss") == wanted
    assert points_in(run / "tensorboard", "val") == [(1, 0.0), (3, 0.0), (5, 100.0), (7, 100.0)]
    assert {
        step: value for (key, step), value in journal_metrics(run).items() if key == "loss"
    } == (dict(wanted))


def history(run: Path) -> list[dict[str, Any]]:
    """Return the rows in the files of W&B, which are logs of records in the form of LevelDB."""
    wandb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        records = []
        # A process of W&B writes the files, and the record of the end comes last.
        deadline = time.monotonic() + 240
        while not any(each.WhichOneof("record_type") == "exit" for each in records):
            assert time.monotonic() < deadline
            records = [wandb.Record.FromString(content) for content in _records(file.read_bytes())]
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items}
                found.append({key: row[key] for key in row if not key.startswith("_")})
            elif record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.display_name) == ("u", "n lr=1")
    return found


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(content):
        if (left := block - place % block) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_offline_has_each_point_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="NO W&B TEST: pip install wandb")
    run = tmp_path / "r"
    given: dict[str, Any] = {"project": "p", "mode": "offline", "options": {"tags": ["x"]}}
    positions = attempt(run, [WeightsAndBiases(**given)], 0, range(1, 7), 0.0)
    attempt(run, [WeightsAndBiases(**given)], positions[3], range(5, 9), 100.0)
    # What W&B has of a repeated step stays: it cannot take values back.
    assert history(run) == [
        *[
            {"global_step": step, "loss": step} | ({"val": 0} if step % 2 else {})
            for step in range(1, 7)
        ],
        {"global_step": 7, "loss": 107, "val": 100},
        {"global_step": 8, "loss": 108},
    ]


@pytest.mark.slow
def test_a_training_with_tensorboard_and_a_tracker_of_a_user(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hpctrain.trackers import OtherTracker\n"
        "class Lines(OtherTracker):\n"
        "    def log_metrics(self, metrics, step):\n"
        "        with open(self.run_dir / 'lines', 'a') as file:\n"
        "            print(step, *metrics, file=file)\n"
        "class NoTracker:\n"
        "    pass\n"
    )
    also = "tracking.also=[{_target_: hpctrain.trackers.TensorBoard},{_target_: mine.%s}]"
    given = ("train.max_steps=20", "train.log_every=5", "tracking.upload=false")
    done = train(*given, also % "NoTracker", code=2, PYTHONPATH=str(tmp_path))
    assert "tracking.also[1]" in done.stderr
    assert "it makes a NoTracker; it must be a class that inherits" in done.stderr
    train(*given, also % "Lines", PYTHONPATH=str(tmp_path))
    (run,) = runs(tmp_path / "runs")
    losses = {s: v for (key, s), v in journal_metrics(run).items() if key == "train/loss"}
    shown = points_in(run / "tensorboard", "train/loss")
    assert [step for step, _ in shown] == [5, 10, 15, 20]
    assert shown == [(step, pytest.approx(losses[step])) for step in sorted(losses)]
    assert (run / "lines").read_text().startswith("5 ")
