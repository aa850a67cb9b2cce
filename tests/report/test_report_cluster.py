"""A scaling series on a real Slurm: its names, its queue time, and its account."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.report import report_command
from tests.conftest import Completed, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]


def test_a_strong_series_and_its_queue(
    train: Callable[..., Completed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        *("-m", "+scaling=strong", "launch.nodes=1,2", "train.max_steps=60", "launch.wait=true"),
        "tracking.upload=false",
    )
    folder = tmp_path / "runs"
    assert [run.name.rpartition("-")[0] for run in runs(folder)] == [
        "digits-nodes1",
        "digits-nodes2",
    ]
    report_command.main(["--dir", str(folder), "--json"])
    for found in json.loads(capsys.readouterr().out):
        time = found["time"]
        parts = sum(value for name, value in time.items() if name != "allocated")
        assert parts == pytest.approx(time["allocated"], rel=0.01)
        assert found["queue_s"] is not None
        assert found["goodput"] > 0
    report_command.main(["--dir", str(folder)])
    shown = capsys.readouterr().out
    assert "strong scaling, from 1 ranks:" in shown
    assert "2 ranks on 2 nodes" in shown
