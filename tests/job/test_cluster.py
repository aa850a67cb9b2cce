"""Training on a real Slurm cluster: sweeps over several nodes, preemption and failures."""

import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpctrain.runs.sweep_overrides import label
from tests import cluster
from tests.bounds import EXACT
from tests.cluster import Paced
from tests.conftest import Completed, journal_metrics, only_run, run_json, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        return store.execute(sql).fetchall()


def test_every_rank_sees_its_place(tmp_path: Path) -> None:
    shape = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    # Each rank has an output file, because srun mixes the output of several ranks.
    output = f"--output={tmp_path}/%t.json"
    cluster.slurm(
        "srun", *shape, output, sys.executable, "-m", "hpctrain", "doctor", "--env", "--json"
    )
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    ranks = [fact["ranks"] for fact in facts]
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3]
    assert [r["local_rank"] for r in ranks] == [0, 1, 0, 1]
    assert [r["node_rank"] for r in ranks] == [0, 0, 1, 1]
    assert {r["world_size"] for r in ranks} == {4}
    assert len({(r["master_addr"], r["master_port"]) for r in ranks}) == 1
    assert [fact["host"] for fact in facts] == [h for h in ranks[0]["hosts"] for _ in range(2)]
    assert facts[0]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("tasks", "layout"),
    [
        (1, "zero3"),
        # The two ranks of a node divide the model; the nodes are replicas. With two tasks on each
        # of two nodes, slurm/test_templates.py trains as well.
        pytest.param(2, "hsdp", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_of_two_jobs_of_two_nodes(
    tasks: int, layout: str, train: Train, digits: Path, tmp_path: Path
) -> None:
    size = ("train.max_epochs=1", "train.log_every=10", "precision=fp64")
    common = (*size, "optimizer.lr=1e-3,3e-3", "tracking.drain_s=60")
    shape = ("launch.nodes=2", f"launch.tasks_per_node={tasks}", f"parallel={layout}")
    done = train("-m", *common, *shape)
    assert "sbatch is on the PATH" in done.stderr
    folder = tmp_path / "runs"
    jobs = cluster.job_ids(folder)
    assert sorted(job.rpartition("_")[2] for job in jobs) == ["0", "1"]
    # Whether the jobs wait, run or have ended, the same command submits none of them again.
    again = train("-m", *common, *shape)
    assert again.stderr.count(" already") + again.stderr.count("finished before") == 2
    assert cluster.job_ids(folder) == jobs
    assert set(cluster.wait_for_end(jobs).values()) == {"COMPLETED"}
    array = jobs[0].partition("_")[0]
    print(
        cluster.slurm(
            "sacct", "-j", array, "-o", "jobid,state,exitcode,elapsed,nnodes,ntasks,nodelist"
        )
    )

    alone = tmp_path / "alone"
    for lr in ("1e-3", "3e-3"):
        train(*size, f"optimizer.lr={lr}", "tracking.upload=false", f"output_dir={alone}")
    for run in runs(folder):
        record, single = run_json(run), run_json(alone / run.name)
        assert record["state"] == "finished"
        attempt = record["attempts"][-1]
        assert (attempt["world_size"], len(attempt["hosts"])) == (2 * tasks, 2)
        losses = journal_metrics(run), journal_metrics(alone / run.name)
        for step in (10, 20):
            ours, theirs = (metrics["train/loss", step] for metrics in losses)
            assert ours == pytest.approx(theirs, rel=EXACT)
        accuracy = single["result"]["val/accuracy"]
        assert record["result"]["val/accuracy"] == pytest.approx(accuracy, rel=EXACT)
        assert sorted(path.name for path in run.glob("checkpoints/step-*"))[-1] == "step-00000022"
        assert (run / "logs" / f"{cluster.job_id(run)}.rank{2 * tasks - 1}.log").exists()

    *tracked, sweep = query(folder, "SELECT name, status FROM runs ORDER BY name")
    named = [f"{run.name} {label(run_json(run)['swept'])}" for run in runs(folder)]
    assert tracked == [(name, "FINISHED") for name in named]
    assert sweep == (run_json(runs(folder)[0])["sweep"]["name"], "FINISHED")
    parents = query(folder, "SELECT value FROM tags WHERE key='mlflow.parentRunId'")
    assert len(parents) == 2
    assert len(set(parents)) == 1
    for run in runs(folder):
        (uid,) = {run_json(run)["uid"]}
        of_run = f"IN (SELECT run_uuid FROM tags WHERE key='hpctrain.uid' AND value='{uid}')"
        points = query(folder, f"SELECT key, step, value FROM metrics WHERE run_uuid {of_run}")
        others = ("perf/", "system/")  # speeds differ between attempts, sensors between nodes
        logged = {(key, step): value for key, step, value in points if not key.startswith(others)}
        assert logged == journal_metrics(run)
        (params,) = query(folder, f"SELECT count(*) FROM params WHERE run_uuid {of_run}")
        assert params[0] > 10
    assert train("-m", *common, *shape).stderr.count("finished before") == 2


@pytest.mark.usefixtures("store")
def test_preempted_requeued_resumed(
    train: Train, tmp_path: Path, paced: Paced, no_sbatch: dict[str, str]
) -> None:
    common = ("train.max_epochs=10", "checkpoint.every_steps=20", "train.log_every=10", paced.task)
    here = ("launch.tasks_per_node=2", "site.partition=preemptible", "tracking.drain_s=60")
    train("-m", *common, *here)
    run = only_run(tmp_path)
    (job,) = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for_step(run, 40)
    preempted = cluster.tool("preempt", job)
    assert preempted.returncode == 0, preempted.stderr
    cluster.wait_for(lambda: run_json(run)["state"] == "interrupted", 180, "the save")
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
    paced.go()
    assert cluster.tool("hurry", job).returncode == 0
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    first, second = run_json(run)["attempts"]
    assert (first["state"], first["reason"]) == ("interrupted", "SIGTERM")
    assert (first["cause"], first["verdict"]) == ("preempted", "requeue")
    assert second["restart_count"] == 1
    assert query(tmp_path / "runs", "SELECT status FROM runs") == [("FINISHED",)]
    # The metrics equal those of two undisturbed ranks, which need no cluster.
    folder = tmp_path / "undisturbed"
    where = ("tracking.upload=false", f"output_dir={folder}")
    train("-m", *common, "launch.tasks_per_node=2", *where, **no_sbatch)
    (undisturbed,) = runs(folder)
    assert run_json(undisturbed)["attempts"][-1]["world_size"] == 2
    assert journal_metrics(run) == journal_metrics(undisturbed)


KILLED = """\
import os, signal, time
import torch.distributed as dist
from hpctrain.tasks import Classification

class Killed(Classification):
    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 25 and dist.get_rank() == 1:
            for name in ("SIGKILL", "SIGSTOP"):
                asked = os.path.dirname(__file__) + "/" + name
                if os.path.exists(asked):
                    os.rename(asked, asked + ".done")
                    os.kill(os.getpid(), getattr(signal, name))
        return super().__call__(model, batch)
"""


def test_a_killed_rank_and_one_that_hangs_are_started_again_in_the_same_job(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sbatch: dict[str, str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    common = (
        *("train.max_epochs=4", "checkpoint.every_steps=20", "train.log_every=10"),
        *("task._target_=killed.Killed", "tracking.upload=false", "hang.floor_s=12"),
    )
    (tmp_path / "SIGKILL").touch()
    train("-m", *common, "launch.nodes=2")
    run = only_run(tmp_path)
    (job,) = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for(lambda: run_json(run)["state"] == "interrupted", 180, "the kill")
    (tmp_path / "SIGSTOP").touch()  # for the second attempt
    cluster.wait_for((tmp_path / "SIGSTOP.done").exists, 180, "the rank that hangs")
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    attempts = run_json(run)["attempts"]
    assert [(each["restart_count"], each["step_id"]) for each in attempts] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ]
    assert [each["first_step"] for each in attempts] == [0, 20, 40]
    assert [each["state"] for each in attempts] == ["interrupted", "interrupted", "finished"]
    assert [one.get("cause") for one in attempts] == ["rank killed", "hang", None]
    assert [one.get("verdict") for one in attempts] == ["restart", "restart", None]
    killed = r"a rank was killed \(exit code 1|rank 1 \(node2, pid \d+\) has died "
    assert re.match(killed, attempts[0]["reason"])
    assert (run / "epochs").read_text() == f"{job} 0 0\n{job} 0 1\n{job} 0 2\n"
    host = attempts[1]["hosts"][1]
    assert re.match(rf"rank 1 \({host}, pid \d+\) hangs after step \d+", attempts[1]["reason"])
    # The metrics are those of two undisturbed ranks, which need no cluster.
    folder = tmp_path / "undisturbed"
    train("-m", *common, "launch.tasks_per_node=2", f"output_dir={folder}", **no_sbatch)
    (undisturbed,) = runs(folder)
    assert run_json(undisturbed)["attempts"][-1]["world_size"] == 2
    assert journal_metrics(run) == journal_metrics(undisturbed)


def test_a_refusal_shows_the_schedulers_words_and_the_key(train: Train, tmp_path: Path) -> None:
    done = train("-m", "seed=1,2", "site.partition=none_such", "tracking=off", code=4)
    assert "site.partition=none_such: sbatch refused" in done.stderr
    assert "partitions here: batch, preemptible" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = train("-m", "seed=1", "launch.gpus_per_node=9", "tracking=off", code=4)
    assert "launch.gpus_per_node=9" in done.stderr
    assert "node configuration is not available" in done.stderr
    assert not (tmp_path / "runs").exists()
