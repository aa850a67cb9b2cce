"""status, logs and cancel on a real Slurm, for preempted, pending, failed and cancelled runs."""

import getpass
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.runs.state import stop_request
from tests import cluster
from tests.cluster import Paced
from tests.conftest import Completed, run_json, run_module, runs
from tests.made_runs import status_json

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
LONG = ("train.max_epochs=9000", "checkpoint.every_steps=20", "tracking=off", Paced.task)


@pytest.fixture
def no_accounting(tmp_path: Path) -> dict[str, str]:
    """An environment in which sacct fails, as it does without an accounting database."""
    folder = tmp_path / "no_accounting"
    folder.mkdir()
    (folder / "sacct").write_text(
        "#!/bin/sh\necho 'Slurm accounting storage is disabled'\nexit 1\n"
    )
    (folder / "sacct").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def submit(train: Train, folder: Path, *arguments: str, **env: str) -> list[Path]:
    """Submit a sweep and return its new run directories."""
    before = {run: run_json(run).get("submission") for run in runs(folder)}
    train("-m", *arguments, **env)
    return [run for run in runs(folder) if run_json(run)["submission"] != before.get(run)]


def status(folder: Path, *arguments: str, **env: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `status` by the name of the run.

    Without variables it is called in this process, because it is called again and again.
    """
    given = ("--dir", str(folder), "--json", *arguments)
    if env:
        rows = json.loads(run_module("hpctrain", "status", *given, **env).stdout)
    else:
        rows = status_json(folder, *arguments)
    return {Path(row["run"]).name: row for row in rows}


def wait_for_state(run: Path, state: str, timeout: float = 180) -> dict[str, Any]:
    def row() -> dict[str, Any] | None:
        found = status(run.parent, run.name)[run.name]
        return found if found["state"] == state else None

    return cluster.wait_for(row, timeout, f"{run.name} {state}")


def hurry(run: Path) -> None:
    job = status(run.parent, run.name)[run.name]["job_id"]
    done = cluster.tool("hurry", job)
    assert done.returncode == 0, done.stderr


def test_from_the_queue_to_the_end(
    train: Train, tmp_path: Path, no_accounting: dict[str, str], paced: Paced
) -> None:
    folder = tmp_path / "runs"
    shape = ("site.partition=preemptible", "launch.max_running=1")
    pair = submit(train, folder, *LONG, *shape, "seed=1,2")

    def one_runs() -> dict[str, dict[str, Any]] | None:
        rows = status(folder)
        return rows if {row["state"] for row in rows.values()} == {"running", "queued"} else None

    rows = cluster.wait_for(one_runs, 180, "one to run")
    # Only one of the two may run, and the other one shows why it waits.
    (waiting,) = [run for run in pair if rows[run.name]["state"] == "queued"]
    (running,) = [run for run in pair if run != waiting]
    assert rows[waiting.name]["reason"].startswith("JobArrayTaskLimit")
    cluster.wait_for_step(running, 40)
    cluster.wait_for(lambda: (running / "progress.json").exists(), 90, "its pulse")
    row = status(folder, running.name)[running.name]
    assert (row["state"], row["reason"], row["max_steps"]) == ("running", "", 198000)
    assert row["eta_s"] is None or row["eta_s"] > 0
    assert row["nodes"].startswith("node")

    # A waiting job leaves the queue at once. Without accounting, status shows the same.
    done = run_module("hpctrain", "cancel", "--dir", str(folder), waiting.name)
    assert "cancelled, was queued" in done.stdout
    me = getpass.getuser()
    for env in ({}, no_accounting):
        told = status(folder, **env)[waiting.name]
        assert (told["state"], told["reason"]) == ("cancelled", f"by {me}")

    # A preempted run saves, waits in the queue and goes on.
    assert cluster.tool("preempt", row["job_id"]).returncode == 0
    row = wait_for_state(running, "requeued")
    assert ", to start about " in row["reason"]
    assert run_json(running)["state"] == "interrupted"
    hurry(running)
    cluster.wait_for(lambda: len(run_json(running)["attempts"]) == 2, 180, "the second attempt")
    first = run_json(running)["attempts"][0]["step"]
    cluster.wait_for_step(running, first + 20)
    assert status(folder, running.name)[running.name]["restarts"] == 1

    # `cancel --save` gets the whole sweep.
    (sweep,) = (folder / "sweeps").iterdir()
    done = run_module("hpctrain", "cancel", "--save", "--dir", str(folder), sweep.name)
    assert f"{waiting.name}: cancelled, nothing to do" in done.stdout
    assert f"{running.name} ({row['job_id']}): asked to save and stop" in done.stdout
    # Slurm shows neither FAILED nor COMPLETED, which would start the jobs that depend on this one.
    assert cluster.wait_for_end([row["job_id"]]) == {row["job_id"]: "CANCELLED"}
    row = wait_for_state(running, "interrupted")
    assert f"cancelled by {me}" in row["reason"]
    saved = run_json(running)["attempts"][1]["step"]
    assert saved >= first + 20
    assert list(running.glob(f"checkpoints/step-{saved:08d}"))
    cluster.wait_for(
        lambda: not cluster.slurm("squeue", "-h", "--me", "-n", "digits"), 180, "an empty queue"
    )
    assert status(folder, **no_accounting)[running.name]["state"] == "interrupted"

    # The same command goes on where the runs stopped, and the old stop request is void.
    submit(train, folder, *LONG, *shape, "seed=1,2")
    cluster.wait_for(lambda: len(run_json(running)["attempts"]) == 3, 180, "the third attempt")
    cluster.wait_for_step(running, saved + 20)
    assert not stop_request.StopRequest.path(running).exists()
    attempts = run_json(running)["attempts"]
    assert attempts[2]["restart_count"] == 0
    log = running / "logs" / f"{status(folder)[running.name]['job_id']}.rank0.log"
    steps = [
        int(line.split()[2].split("/")[0])
        for line in log.read_text().splitlines()
        if " step " in line and "  loss " in line  # not an evaluation that is made again
    ]
    assert min(steps) > saved
    done = run_module("hpctrain", "cancel", "--all", "--dir", str(folder), "--json")
    assert {row["action"] for row in json.loads(done.stdout)} == {"cancel"}
    wait_for_state(running, "interrupted")


@pytest.mark.slow
def test_a_stop_request_outlives_a_requeue(train: Train, tmp_path: Path, paced: Paced) -> None:
    """A run that gets a stop request while it is preempted is restarted, and then stops."""
    (run,) = submit(train, tmp_path / "runs", *LONG, "site.partition=preemptible")
    cluster.wait_for_step(run, 20)
    job = status(run.parent)[run.name]["job_id"]
    assert cluster.tool("preempt", job).returncode == 0
    wait_for_state(run, "requeued")
    stop_request.write(run, "me")
    hurry(run)
    cluster.wait_for(
        lambda: run_json(run)["attempts"][-1].get("reason") == "cancel", 180, "the stop"
    )
    row = wait_for_state(run, "interrupted")
    assert "cancelled by" in row["reason"]
    assert len(run_json(run)["attempts"]) == 2
    assert cluster.job_state(job) != "PENDING"


SHORT = ("train.max_steps=1", "tracking=off")


def wait_in_the_queue(train: Train, folder: Path) -> Path:
    """Submit a run that begins in an hour, as one that was requeued; return its directory."""
    train("-m", *SHORT, "+site.sbatch.begin=now+1hour")
    (run,) = runs(folder / "runs")
    return run


def test_the_same_command_here_names_the_job_that_waits(train: Train, tmp_path: Path) -> None:
    run = wait_in_the_queue(train, tmp_path)
    job, before = cluster.job_id(run), run_json(run)
    refused = train(*SHORT, code=4).stderr
    # Slurm knows the reason after its next look at the queue.
    assert re.search(rf"job {job} of this run waits in the queue( \(\w+\))?, and goes on", refused)
    assert f"`python -m hpctrain cancel {run}`" in refused
    assert run_json(run) == before
