"""A real search whose workers are preempted and killed has the values of an undisturbed one."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.search.worker_arrays import in_queue
from tests import cluster
from tests.conftest import run_json, runs
from tests.faults.disturbed import command_line
from tests.search.test_search_cluster import QUIET, found_in

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
TASK = """\
import os, time
from hpctrain.tasks import Classification

class Task(Classification):
    def __call__(self, model, batch):
        if model.training and os.path.exists(os.path.dirname(__file__) + "/slow"):
            time.sleep(4)
        return super().__call__(model, batch)
"""
SEARCH = (
    *("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize", "metric=val/loss", *QUIET),
    *("hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=12", "hydra.sweeper.rungs=[8,16]"),
    *("train.max_steps=32", "train.eval_every=32", "checkpoint.every_steps=1"),
    *(
        "launch.tasks_per_node=2",
        "site.partition=preemptible",
        "task._target_=disturbed_search.Task",
    ),
    *("optimizer.lr=1e-3,3e-3,1e-2,3e-2", "model.dropout=0.0,0.1,0.3"),
)
RANKS_KILLED, WORKERS_KILLED, PREEMPTED = 8, 2, 3


def ranks(sweep: Path) -> list[int]:
    """Return the processes that are ranks of the search's workers."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    lines = {pid: command_line(pid).split() for pid in pids}
    return [
        pid
        for pid, words in lines.items()
        if words and "python" in words[0] and str(sweep) in words[-1] and words[-2] == "work"
    ]


def values(folder: Path) -> dict[str, dict[int, float]]:
    return {trial.run: dict(trial.values) for trial in found_in(folder)[1].trials}


@pytest.mark.timeout(2400)
def test_kills_and_preemptions_change_no_value_but_the_order(train: Any, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "disturbed_search.py").write_text(TASK)
    given = {"PYTHONPATH": str(code)}
    (code / "slow").touch()
    search = (*SEARCH, "hydra.sweeper.n_jobs=3", "hydra.sweeper.eta=2")
    train(*search, **given)
    sweep, _ = found_in(tmp_path / "runs")
    rng = random.Random(45)
    acts = ["rank"] * RANKS_KILLED + ["worker"] * WORKERS_KILLED + ["preempt"] * PREEMPTED
    rng.shuffle(acts)

    def jobs() -> list[str]:
        for job in in_queue(sweep):
            if job.recorded_state == "queued":
                cluster.tool("hurry", job.job_id)
        return [job.job_id for job in in_queue(sweep) if job.recorded_state == "running"]

    def trains() -> bool:
        assert not found_in(tmp_path / "runs")[1].ended, "the search was too short"
        states = [run_json(run)["state"] for run in runs(tmp_path / "runs")]
        return bool(jobs()) and "running" in states and bool(ranks(sweep))

    def preempt() -> bool:
        return any(cluster.tool("preempt", job).returncode == 0 for job in jobs()[:1])

    for act in acts:
        cluster.wait_for(trains, 300, "a training")
        time.sleep(rng.uniform(0, 3))
        if act == "rank":
            os.kill(
                rng.choice(cluster.wait_for(lambda: ranks(sweep), 240, "ranks")), signal.SIGKILL
            )
        elif act == "worker":
            job = rng.choice(cluster.wait_for(jobs, 240, "a worker"))
            cluster.slurm("scancel", "--full", "--signal=KILL", job)
            cluster.wait_for(lambda: len(in_queue(sweep)) < 3, 120, "the end of the worker")
            train(*search, **given)
        elif act == "preempt":
            cluster.wait_for(preempt, 240, "a preemption")
        print(act, flush=True)
    (code / "slow").unlink()

    def ended() -> bool:
        if not jobs() and not in_queue(sweep):
            train(*search, **given)
        return bool(found_in(tmp_path / "runs")[1].ended)

    cluster.wait_for(ended, 600, "the end of the search")
    found = found_in(tmp_path / "runs")[1]
    attempts = [one for run in runs(tmp_path / "runs") for one in run_json(run)["attempts"]]
    print([(each["state"], each.get("cause")) for each in attempts])
    assert len(found.trials) == 12
    assert {trial.state for trial in found.trials} <= {"finished", "pruned"}
    alone = tmp_path / "alone"
    every = (*SEARCH, "hydra.sweeper.n_jobs=1", "hydra.sweeper.eta=1", "launch.wait=true")
    train(*every, f"output_dir={alone}", timeout=900, **given)
    undisturbed = values(alone)
    for run, seen in values(tmp_path / "runs").items():
        assert seen == {step: undisturbed[run][step] for step in seen}
    assert sum(len(each) for each in values(tmp_path / "runs").values()) > 12
