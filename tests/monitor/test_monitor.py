"""Tests of the monitor's process beside real trainings, on a machine without GPUs."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hpctrain.config.schema import MonitorConfig
from hpctrain.monitor import process, start
from hpctrain.record import written
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


@pytest.mark.slow
def test_samples_of_a_training_are_in_its_directory_and_in_mlflow(
    train: Train, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "wait.py").write_text(SLOW)
    arguments = ("train.max_steps=30", "+hooks=[{_target_: wait.Wait}]", "monitor.every_s=0.2")
    train(*arguments, "tracking.drain_s=200")
    (run,) = runs(tmp_path / "runs")
    ((node, file),) = samples.files(run).items()
    found = [*samples.read(file)]
    assert len(found) >= 5
    assert [s.number for s in found] == [*range(len(found))]
    assert found[0].facts["kernel"]
    found = [s for s in found if not s.facts]
    names = {"cpu_utilization_percentage", "system_memory_usage_percentage"}
    assert all(names <= s.metrics.keys() for s in found)
    assert all(s.metrics["system_memory_usage_megabytes"] > 100 for s in found)
    assert not (samples.folder(run) / f"{node}.log").read_text()
    # The uploader does not stumble over the records of where the time went.
    assert '"kind":"time"' in (run / "journal" / "events.jsonl").read_text()
    assert "no use for" not in (run / "journal" / "uploader.log").read_text()
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute(
            "SELECT value FROM metrics WHERE key = ? ORDER BY step",
            [f"system/{node}/system_memory_usage_megabytes"],
        ).fetchall()
    assert [value for (value,) in rows] == [
        s.metrics["system_memory_usage_megabytes"] for s in found
    ]


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


@pytest.mark.slow
def test_it_costs_little(tmp_path: Path) -> None:
    """Below 0.5% of a core and 50 MB with the default of 10 s, counted in CPU time of its process.

    It reads 20 times a second here: 0.5% of 10 s are 50 ms for a reading.
    """
    job = process.Job(MonitorConfig(every_s=0.05), os.getpid())
    command = [sys.executable, "-m", "hpctrain.monitor.process", str(tmp_path), written(job)]
    (tmp_path / "monitor").mkdir()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as monitor:
        file = tmp_path / "monitor" / f"{socket.gethostname()}.jsonl"

        def seen(count: int) -> float:
            """Wait for so many samples; return the CPU time of the process."""
            while not file.exists() or len([*samples.read(file)]) < count:
                assert monitor.poll() is None
                time.sleep(0.1)
            times = psutil.Process(monitor.pid).cpu_times()
            return times.user + times.system

        start_s = seen(10)
        each_ms = 1000 * (seen(210) - start_s) / 200
        memory = psutil.Process(monitor.pid).memory_info().rss / 1e6
        maps = Path(f"/proc/{monitor.pid}/maps").read_text()
        monitor.communicate(b"")
    print(f"start {start_s:.2f} s, {each_ms:.2f} ms a sample, {memory:.0f} MB")
    assert each_ms < 50
    assert memory < 50
    assert "libtorch" not in maps


def test_an_attempt_reads_no_gpus_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of a node may belong to another job by then; there is no GPU here to be read."""
    opened: list[list[str]] = []

    def gpus(uuids: list[str], nvml: Any = None) -> Any:
        opened.append(uuids)
        return SimpleNamespace(facts={}, read=dict)

    monkeypatch.setattr(start, "_start", lambda *_: None)
    monkeypatch.setattr(process, "Gpus", gpus)
    ours = process.Job(MonitorConfig(), os.getpid(), 2)
    for attempt in (["GPU-a", "GPU-b"], ["GPU-c", "GPU-a"], [None, "GPU-d"]):
        for rank, uuid in enumerate(attempt):
            place = SimpleNamespace(local_rank=rank)
            with start.monitored(MonitorConfig(), tmp_path, place, [uuid] if uuid else []):  # type: ignore[arg-type]
                pass
        monitor = process._Monitor(tmp_path, ours)
        monitor._take_gpus()
        assert opened[-1] == [uuid for uuid in attempt if uuid]
