"""`hpctrain cancel` and what becomes of runs that train on this machine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.runs.state import stop_request
from tests import forkserver
from tests.conftest import run_json, run_module, runs
from tests.made_runs import status_json


@contextmanager
def training(digits: Path, tmp_path: Path, *arguments: str) -> Iterator[tuple[Any, Path]]:
    """A long training in its own process, which has written its first checkpoint."""
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "tracking=off"]
    given = ["experiment=digits", "train.max_epochs=9000", "checkpoint.every_steps=20"]
    command = [sys.executable, "-m", "hpctrain", *given, *where, *arguments]
    process = forkserver.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("runs/*/checkpoints/step-????????")):
            assert process.poll() is None
            time.sleep(0.1)
        yield process, runs(tmp_path / "runs")[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow  # test_commands_cluster.py does both on the cluster
def test_cancel_and_resume_here(digits: Path, tmp_path: Path, no_slurm: None) -> None:
    with training(digits, tmp_path) as (process, run):
        (row,) = status_json(tmp_path / "runs")
        assert (row["state"], row["reason"]) == ("running", "")
        # gc must not delete anything of a run that trains, and must not disturb the run.
        assert "nothing to delete" in run_module("hpctrain", "gc", cwd=tmp_path).stdout
        done = run_module("hpctrain", "cancel", run.name, "--save", cwd=tmp_path)
        assert f"{run.name}: asked to save and stop" in done.stdout
        assert process.wait(60) == 143
    record = run_json(run)
    assert record["attempts"][-1]["reason"] == "cancel"
    saved = record["attempts"][-1]["step"]
    assert f"{run.name}: saved at step {saved}; it ends now" in done.stdout
    (row,) = status_json(tmp_path / "runs")
    assert row["state"] == "interrupted"
    assert row["step"] == record["attempts"][-1]["step"]
    assert "cancelled by" in row["reason"]
    # A person starts the run again, so the old stop request is void. Without --save the run ends
    # at once.
    with training(digits, tmp_path) as (process, _):
        while len(run_json(run)["attempts"]) < 2:
            time.sleep(0.1)
        assert not stop_request.stop_file(run).exists()
        done = run_module("hpctrain", "cancel", "--all", "--json", cwd=tmp_path)
        assert json.loads(done.stdout)[0]["action"] == "terminate"
        assert process.wait(60) == 143
    assert run_json(run)["attempts"][-1]["reason"] == "SIGTERM"
    assert run_json(run)["attempts"][-1]["step"] > record["attempts"][-1]["step"]
    done = run_module("hpctrain", "cancel", run.name, cwd=tmp_path)
    assert "interrupted, nothing to do" in done.stdout
    assert "nothing is queued" in run_module("hpctrain", "cancel", "--all", cwd=tmp_path).stdout
    assert "or --all" in run_module("hpctrain", "cancel", cwd=tmp_path, code=2).stderr


def test_killed_here_is_lost(digits: Path, tmp_path: Path, no_slurm: None) -> None:
    with training(digits, tmp_path) as (process, run):
        process.kill()
        process.wait()
    progress = json.loads((run / "progress.json").read_text())
    # For a minute the heartbeat could be that of a process on another host.
    progress["time"] -= 100
    (run / "progress.json").write_text(json.dumps(progress))
    record = run_json(run)
    record["attempts"][0]["started"] -= 100
    (run / "run.json").write_text(json.dumps(record))
    (row,) = status_json(tmp_path / "runs")
    assert row["state"] == "lost"
    assert "no process holds it on" in row["reason"]
