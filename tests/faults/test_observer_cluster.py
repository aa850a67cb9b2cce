"""The observers of two nodes of a real Slurm name the rank that hangs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
HANGING = """\
import os, signal, time

import torch.distributed as dist

from hpctrain.training import Hook


class Stop(Hook):
    def after_step(self, state):
        time.sleep(0.1)
        if state.step == 40 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_rank_of_another_node_is_named(
    train: Callable[..., Completed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    train(
        *("-m", "train.max_steps=100000", "+hooks=[{_target_: hanging.Stop}]"),
        *("launch.nodes=2", "tracking.upload=false", "hang.floor_s=3"),
    )
    (run,) = runs(tmp_path / "runs")
    job = cluster.job_id(run)
    cluster.wait_for((run / "hang.json").exists, 300, "a verdict")
    hang = json.loads((run / "hang.json").read_text())
    assert (hang["rank"], hang["state"], hang["step"]) == (1, "stopped", 40)
    assert (hang["job_id"], hang["restart_count"], hang["step_id"]) == (job, 0, 0)
    assert hang["host"] != json.loads((run / "run.json").read_text())["attempts"][0]["host"]
    assert hang["sentence"] in (run / "logs" / f"{job}.rank0.log").read_text()
    # The rank that can answer has written its stacks, and `status` tells the cause first.
    stacks = run / "logs" / "observed" / "rank0.stacks"
    cluster.wait_for(stacks.exists, 100, "the stacks of rank 0")
    shown = json.loads(run_module("hpctrain", "status", "--dir", str(run.parent), "--json").stdout)
    assert shown[0]["reason"].startswith(hang["sentence"])
    cluster.slurm("scancel", job)
    cluster.wait_for_end([job])
