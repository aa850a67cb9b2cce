"""status, logs and cancel on a real Slurm, for preempted, pending, failed and cancelled runs."""

import getpass
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.runs.state import stop_request
from tests import cluster
from tests.cluster import Paced
from tests.conftest import Completed, linked_python, run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
LONG = ("train.max_epochs=9000", "checkpoint.every_steps=20", "tracking=off", Paced.task)
FAULTY = """\
import os, signal
import torch
import torch.distributed as dist
from hpctrain.tasks import Classification

class Faulty(Classification):
    def __init__(self, how, **options):
        super().__init__(**options)
        self.how, self.calls = how, 0

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 5 and dist.get_rank() == 1:
            if self.how == "shapes":
                torch.zeros(2, 3) @ torch.zeros(2, 3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(model, batch)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Count the calls of Slurm's commands: wrappers on the PATH record a call and run the command.

    Returns:
        A function that returns the counts since it was last called.
    """
    wrappers, log = tmp_path / "wrappers", tmp_path / "calls"
    wrappers.mkdir()
    for name in ("squeue", "sacct", "scancel", "scontrol"):
        (real,) = cluster.slurm("which", name).splitlines()
        # A job inherits this PATH, but its own calls do not count.
        count = f'[ -n "$SLURM_JOB_ID" ] || echo {name} >>{log}'
        (wrappers / name).write_text(f'#!/bin/sh\n{count}\nexec {real} "$@"\n')
        (wrappers / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrappers}:{os.environ['PATH']}")

    def counted() -> dict[str, int]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return {name: names.count(name) for name in sorted(set(names))}

    return counted


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
    """Return the rows of `status` by the name of the run."""
    given = ("--dir", str(folder), "--json", *arguments)
    rows = json.loads(run_module("hpctrain", "status", *given, **env).stdout)
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
    train: Train,
    tmp_path: Path,
    calls: Callable[[], dict[str, int]],
    no_accounting: dict[str, str],
    paced: Paced,
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
    calls()
    row = status(folder, running.name)[running.name]
    assert calls() == {"squeue": 1}
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
    calls()
    done = run_module("hpctrain", "cancel", "--save", "--dir", str(folder), sweep.name)
    counted = calls()
    assert counted["squeue"] == counted["scancel"] == 1
    assert f"{waiting.name}: cancelled, nothing to do" in done.stdout
    assert f"{running.name} ({row['job_id']}): asked to save and stop" in done.stdout
    saved = run_json(running)["attempts"][1]["step"]
    told = f"{running.name} ({row['job_id']}): saved at step {saved}; its job ends now"
    assert told in done.stdout
    # Slurm shows neither FAILED nor COMPLETED, which would start the jobs that depend on this one.
    assert cluster.wait_for_end([row["job_id"]]) == {row["job_id"]: "CANCELLED"}
    row = wait_for_state(running, "interrupted")
    assert f"cancelled by {me}" in row["reason"]
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
    assert not stop_request.stop_file(running).exists()
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


@pytest.mark.slow
def test_why_runs_failed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accounting: dict[str, str]
) -> None:
    folder, modules = tmp_path / "runs", tmp_path / "modules"
    modules.mkdir()
    (modules / "faulty.py").write_text(FAULTY)
    (modules / "later.py").write_text("import no_such_module\n\n\nclass Task: ...\n")
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{os.environ.get('PYTHONPATH', '')}")
    shape = ("tracking=off", "launch.nodes=2")
    faulty = ("task._target_=faulty.Faulty", "+task.how=shapes,killed", "train.max_steps=50")
    pair = submit(train, folder, *shape, *faulty)
    killed, shapes = sorted(
        pair, key=lambda run: "how: shapes" in (run / "config.yaml").read_text()
    )
    (imports,) = submit(train, folder, *shape[:1], "task._target_=later.Task")
    # The interpreter is deleted before the job begins.
    python = linked_python(tmp_path / "env")
    monkeypatch.setattr(sys, "executable", str(python))
    (missing,) = submit(train, folder, *shape[:1], "seed=7", "+site.sbatch.hold=true")
    python.unlink()
    cluster.slurm("scontrol", "release", cluster.job_id(missing))
    monkeypatch.undo()

    def error(run: Path, state: str) -> dict[str, Any]:
        wait_for_state(run, state)
        # srun writes its last lines a moment after the ranks.
        cluster.wait_for_end([cluster.job_id(run)])
        where = ("logs", run.name, "--dir", str(folder))
        told = json.loads(run_module("hpctrain", *where, "--json").stdout)
        assert (
            f"{told['error']['file']}:{told['error']['line']}: "
            in run_module("hpctrain", *where).stdout
        )
        return dict(told["error"])

    # Killed ranks are started again in the same job, but not for ever: each ends at the same step.
    # A run with an error of its own is not started again.
    found = error(shapes, "failed")
    assert len(run_json(shapes)["attempts"]) == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in found["summary"]
    assert found["rank"] == 1
    assert Path(found["file"]).name.endswith(".rank1.log")
    assert "has died after step 4" in error(killed, "failed")["summary"]
    attempts = run_json(killed)["attempts"]
    assert [attempt["state"] for attempt in attempts[:-1]] == ["interrupted"] * len(attempts[1:])
    assert {(one["restart_count"], one["cause"]) for one in attempts} == {(0, "rank killed")}
    assert [one["step_id"] for one in attempts] == [*range(len(attempts))]
    again = "for the second time at step 4|and no checkpoint was saved since the last restart"
    assert re.search(again, attempts[-1]["error"])
    assert "No module named 'no_such_module'" in error(imports, "failed")["summary"]
    assert f"exec: {python}: not found" in error(missing, "lost")["summary"]
    assert "FAILED, exit code 127:0" in status(folder)[missing.name]["reason"]
    alone = status(folder, **no_accounting)[missing.name]
    assert (alone["state"], alone["reason"]) == ("lost", "no longer in the queue")


@pytest.mark.slow
def test_following_across_a_restart(train: Train, tmp_path: Path, paced: Paced) -> None:
    (run,) = submit(train, tmp_path / "runs", *LONG, "site.partition=preemptible")
    given = ("logs", "-f", run.name, "--dir", str(run.parent))
    command = [sys.executable, "-m", "hpctrain", *given]
    # The command starts before there is a log.
    out = tmp_path / "out"
    with out.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as following:
        cluster.wait_for_step(run, 20)
        job = status(run.parent)[run.name]["job_id"]
        assert cluster.tool("preempt", job).returncode == 0
        wait_for_state(run, "requeued")
        hurry(run)
        cluster.wait_for(lambda: len(run_json(run)["attempts"]) == 2, 180, "the second attempt")
        cluster.wait_for_step(run, run_json(run)["attempts"][0]["step"] + 20)
        run_module("hpctrain", "cancel", "--save", "--dir", str(run.parent), run.name)
        assert following.wait(180) == 0
    text = out.read_text()
    assert text.count(": it resumes there") == 2
    assert f"{run.name} is interrupted (saved at step" in text


@pytest.mark.slow
def test_a_thousand_runs_ask_slurm_once(
    tmp_path: Path, calls: Callable[[], dict[str, int]]
) -> None:
    folder = tmp_path / "runs"
    array = folder / "sweeps" / "2026-01-01" / "array-0"
    array.mkdir(parents=True)
    (array / "job_id").write_text("4000000\n")
    states = ("finished", "queued", "running", "failed", "interrupted")
    for number in range(1000):
        state, run = states[number % 5], folder / f"digits-{number:08x}"
        run.mkdir()
        attempt = {"started": 1.0, "ended": 2.0, "step": 3, "error": "E: x", "hosts": ["node1"]}
        record = {
            "state": state,
            "attempts": [] if state == "queued" else [attempt],
            "submission": {
                "script": str(array / "job.sh"),
                "task": number,
                "user": getpass.getuser(),
                "time": 1.0,
            },
        }
        (run / "run.json").write_text(json.dumps(record))
        (run / "progress.json").write_text(json.dumps({"step": 3, "max_steps": 9, "time": 1.5}))
    calls()
    before = os.times()
    rows = status(folder)
    after = os.times()
    # Processor time, because the machine may be busy with something else.
    seconds = sum(after[2:4]) - sum(before[2:4])
    print(f"status of 1,000 runs: {seconds:.2f} s of processor time")
    assert calls() == {"squeue": 1, "sacct": 1}
    assert len(rows) == 1000
    assert sum(row["state"] == "lost" for row in rows.values()) == 400
    assert 0 < seconds < 5  # 0.4 s are usual


@pytest.mark.slow  # launch/test_submission.py has a fast one
def test_a_controller_that_does_not_answer(train: Train, tmp_path: Path, paced: Paced) -> None:
    (run,) = submit(train, tmp_path / "runs", *LONG)
    cluster.wait_for_step(run, 20)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "squeue").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n"
    )
    (folder / "squeue").chmod(0o755)
    blind = {"PATH": f"{folder}:{os.environ['PATH']}"}
    where = ("--dir", str(run.parent))
    done = run_module("hpctrain", "status", *where, **blind)
    assert "squeue does not answer" in done.stderr
    assert "1 running" in done.stdout
    done = run_module("hpctrain", "cancel", run.name, *where, code=4, **blind)
    assert "nothing was" in done.stderr
    assert "nothing to delete" in run_module("hpctrain", "gc", *where, **blind).stdout
    assert status(run.parent)[run.name]["state"] == "running"


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
    assert f"job {job} of this run waits in the queue (BeginTime), and goes on" in refused
    assert f"`python -m hpctrain cancel {run}`" in refused
    assert run_json(run) == before


@pytest.mark.slow
def test_a_run_whose_job_waits_is_trained_here_once_it_is_cancelled(
    train: Train, tmp_path: Path
) -> None:
    run = wait_in_the_queue(train, tmp_path)
    job, before = cluster.job_id(run), run_json(run)
    frozen = run_module("hpctrain", "run", str(run), code=4, cwd=tmp_path).stderr
    assert f"job {job} of this run waits in the queue" in frozen
    local = train("-m", *SHORT, "hydra/launcher=submitit_local", code=4)
    assert "pending already" in local.stderr
    assert run_json(run) == before
    run_module("hpctrain", "cancel", str(run), cwd=tmp_path)
    train(*SHORT)
    assert len(run_json(run)["attempts"]) == 1
