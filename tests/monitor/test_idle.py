"""Tests of the window in which a device must do something."""

from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.insight.monitor.process import Idle
from hpctrain.launch.jobs import outcome
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from tests.report.accounts import write_run


def busy(*values: float) -> dict[str, float]:
    return {f"gpu_{i}_utilization_percentage": value for i, value in enumerate(values)}


def test_only_a_whole_window_counts_and_each_device_is_told_once() -> None:
    idle = Idle(3)
    assert [idle.add(busy(0, 90)) for _ in range(4)] == [[], [], ["gpu_0"], []]


def test_it_is_told_again_after_it_was_busy() -> None:
    idle = Idle(3)
    for value in (90, 0, 0):
        assert idle.add(busy(value)) == []
    assert idle.add(busy(0)) == ["gpu_0"]
    assert idle.add(busy(50)) == []
    assert [idle.add(busy(0)) for _ in range(3)] == [[], [], ["gpu_0"]]


def test_the_start_does_not_count() -> None:
    idle = Idle(3)
    idle.add(busy(0))
    idle.add(busy(0))
    idle.restart()
    assert [idle.add(busy(0)) for _ in range(3)] == [[], [], ["gpu_0"]]


def test_cores_are_watched_where_there_is_no_gpu() -> None:
    idle = Idle(3)
    sample = {"cpu_utilization_percentage": 1.0}
    assert [idle.add(sample) for _ in range(3)][-1] == ["the cores"]
    assert Idle(3).add(sample | busy(90)) == []
    parts = Idle(3)  # of a GPU, which do not tell their use
    assert [parts.add(sample, has_gpus=True) for _ in range(3)] == [[], [], []]


def test_a_stop_that_was_wished_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`launch.wait=true` raises for a run that somebody has cancelled, but not for an idle one."""
    run = RunDir(write_run(tmp_path / "run", [], state="interrupted"))
    stop_request.write(run.path, f"{stop_request.IDLE} (n1: gpu_0 below 5% for 30 minutes)")
    assert outcome(run, "val/loss") is None
    assert "run: stopped by the monitor (n1: gpu_0 below" in caplog.text
    stop_request.write(run.path, "somebody")
    with pytest.raises(LaunchError, match="run is interrupted, not finished"):
        outcome(run, "val/loss")
