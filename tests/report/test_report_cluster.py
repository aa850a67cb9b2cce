"""A scaling series on a real Slurm: its names, its queue time, and its account."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpctrain.report import report_command
from tests.conftest import Completed, run_json, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]


def test_a_series_and_its_queue(
    train: Callable[..., Completed],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(
        *("-m", "+scaling=weak", "launch.nodes=1,2", "train.max_steps=60", "launch.wait=true"),
        "tracking.upload=false",
    )
    folder = tmp_path / "runs"
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs(folder)]
    assert sorted(each["train"]["global_batch_size"] for each in configs) == [64, 128]
    assert sorted(len(run_json(run)["attempts"][0]["hosts"]) for run in runs(folder)) == [1, 2]
    report_command.main(["--dir", str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [each["nodes"] for each in told["scaling"]] == [1, 2]
    for found in told["runs"]:
        time = found["time"]
        parts = sum(value for name, value in time.items() if name != "allocated")
        assert parts == pytest.approx(time["allocated"], rel=0.01)
        assert found["queue_s"] is not None
        assert found["goodput"] > 0
