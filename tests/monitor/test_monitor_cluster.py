"""The monitor in jobs of a real Slurm."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
SLEEP = """\
import time

from hpctrain.training import Hook


class Sleep(Hook):
    def after_step(self, state):
        time.sleep(1.0)
"""
LIMIT = 50  # percent of the cores


def test_a_job_whose_ranks_sleep_saves_and_ends(
    train: Callable[..., Completed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine changes nothing: it gives a rank that sleeps no more to do."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sleeping.py").write_text(SLEEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    train(
        *("-m", "train.max_steps=100000", "+hooks=[{_target_: sleeping.Sleep}]"),
        *("launch.nodes=2", "tracking.upload=false", "monitor.idle_action=stop"),
        *("monitor.every_s=1", "monitor.idle_minutes=0.05", f"monitor.idle_percent={LIMIT}"),
    )
    (run,) = runs(tmp_path / "runs")
    job = cluster.job_id(run)
    assert cluster.wait_for_end([job]) == {job: "CANCELLED"}  # neither failed nor requeued
    (attempt,) = run_json(run)["attempts"]
    assert (attempt["state"], attempt["reason"]) == ("interrupted", "cancel")
    assert (run / "checkpoints" / f"step-{attempt['step']:08d}").is_dir()

    shown = json.loads(run_module("hpctrain", "status", "--dir", str(run.parent), "--json").stdout)
    idle = rf"(node\d): the cores below {LIMIT}% for 0\.05 minutes; monitor\.idle_action=stop"
    said = rf"saved at step {attempt['step']}, cancelled by the monitor \({idle}\)"
    found = re.fullmatch(said, shown[0]["reason"])
    assert found, shown
    assert found[1] in attempt["hosts"]
    ended = (run / "journal" / "events.jsonl").read_text().splitlines()
    assert any("stopped by the monitor" in line and '"KILLED"' in line for line in ended)
