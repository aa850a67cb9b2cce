"""Tests of the monitor's process beside real trainings, on a machine without GPUs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.config.schema import MonitorConfig
from hpctrain.insight.monitor import process, sensors
from hpctrain.tracking import samples
from tests.conftest import Completed, run_json, runs

Train = Callable[..., Completed]
SLOW = """\
import time

from hpctrain.training import Hook


class Wait(Hook):
    def after_step(self, state):
        time.sleep(0.05)
"""


def test_a_run_that_does_nothing_saves_and_ends(train: Train, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(SLOW.replace("0.05", "0.7"))
    # A step here sleeps.
    arguments = [
        *("train.max_steps=100000", "+hooks=[{_target_: wait.Wait}]", "tracking.upload=false"),
        *("monitor.every_s=0.2", "monitor.idle_minutes=0.01"),
    ]
    done = train(*arguments, "monitor.idle_action=stop", code=143)
    (run,) = runs(tmp_path / "runs")
    record = run_json(run)
    assert record["state"] == "interrupted"
    text = json.dumps(record) + done.stderr + (run / "stop").read_text()
    assert "the cores below 5% for 0.01 minutes" in text
    assert "monitor.idle_action=stop" in text
    assert record["attempts"][-1]["step"] >= 2
    (file,) = samples.files(run).values()
    found = [*samples.read(file)]
    assert [s.number for s in found] == [*range(len(found))]
    assert found[0].facts["kernel"]
    assert len([s for s in found if s.metrics.get("cpu_utilization_percentage", 99) < 5]) >= 3


def test_a_window_of_fewer_than_three_samples_is_refused(train: Train, tmp_path: Path) -> None:
    done = train("monitor.every_s=30", "monitor.idle_minutes=1", code=2)
    assert "monitor.idle_minutes=1.0 with monitor.every_s=30.0" in done.stderr
    assert "at least 1.5 minutes" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_attempt_reads_no_gpus_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a node may belong to another job by then; there is no GPU here to be read."""
    opened: list[list[str]] = []

    def gpus(uuids: list[str], nvml: Any = None) -> Any:
        opened.append(uuids)
        return SimpleNamespace(facts={}, read=dict)

    monkeypatch.setattr(process, "_start", lambda *_: None)
    monkeypatch.setattr(sensors, "Gpus", gpus)
    ours = process.MonitorSettings(MonitorConfig(), os.getpid(), 2)
    for attempt in (["GPU-a", "GPU-b"], ["GPU-c", "GPU-a"], [None, "GPU-d"]):
        for rank, uuid in enumerate(attempt):
            place = SimpleNamespace(local_rank=rank)
            with process.monitored(MonitorConfig(), tmp_path, place, [uuid] if uuid else []):  # type: ignore[arg-type]
                pass
        monitor = process._Monitor(tmp_path, ours)
        monitor._take_gpus()
        assert opened[-1] == [uuid for uuid in attempt if uuid]
