"""Tests of status, logs, cancel and gc without a cluster."""

import argparse
import fcntl
import io
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.manifest import Manifest, digest
from hpctrain.commands import cancel, checkpoints, gc, resume
from hpctrain.commands import logs as logs_module
from hpctrain.commands import status as status_module
from hpctrain.commands.logs import _start
from hpctrain.commands.status import Row, _table
from hpctrain.console import Console
from hpctrain.errors import ConfigError, StorageError
from hpctrain.faults.stop import Stop
from hpctrain.lock import file_lock
from hpctrain.record import convert
from hpctrain.report.account.run_account import read
from hpctrain.run_record import Progress, RunRecord
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import state as state_module
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.facts import Facts, gather
from hpctrain.runs.state.first_error import find_fault, tail
from hpctrain.runs.state.log_files import rank_logs
from hpctrain.runs.state.select import are_folders, one_run, select
from hpctrain.runs.state.state import State, duration, ended_for_good, eta_s, judge
from hpctrain.runs.state.stop_request import StopRequest
from hpctrain.runs.terminal_log import kept
from hpctrain.slurm.queue import Ended, Job, jobs_of
from hpctrain.tracking import samples
from hpctrain.tracking.meta import Meta, Uploaded
from hpctrain.tracking.pending_upload import left_behind
from hpctrain.training.display import Display
from hpctrain.training.progress_file import ProgressFile
from tests import forkserver
from tests.conftest import Completed, ignoring_sigint, run_json, run_module, runs

Train = Callable[..., Completed]
NOW = 1_800_000_000.0


def facts_of(
    path: Path,
    record: dict[str, Any],
    progress: dict[str, Any] | None = None,
    stop_request: dict[str, Any] | None = None,
    **more: Any,
) -> Facts:
    asked = stop_request and convert(StopRequest, stop_request, "stop")
    told = convert(Progress, progress or {}, "progress.json")
    return Facts(path, convert(RunRecord, record, "run.json"), told, asked or None, **more)


def make_run(folder: Path, name: str = "digits-00000001", **record: Any) -> Path:
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "config.yaml").touch()
    content = {"uid": name, "state": "created", "attempts": []} | record
    (run / "run.json").write_text(json.dumps(content))
    return run


def drawn(rows: list[Row], width: int, most: int = 40) -> list[str]:
    """Return the lines of `status` on a terminal of this width."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(_table(rows, " in runs", width, most))
    return capture.get().splitlines()


def make_sweep(folder: Path, stamp: str, run_dirs: list[Path]) -> Path:
    sweep = folder / "sweeps" / stamp
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps([{"run": str(run)} for run in run_dirs]))
    return sweep


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


# Tests of the state of a run


def job(state: str, reason: str = "None", start: float | None = None) -> Job:
    when = "N/A" if start is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start))
    return Job("7_0", state, reason, "" if state == "PENDING" else "node1", when)


def ended(state: str) -> Ended:
    return Ended(state, "1:0", "None", "node1")


SUBMITTED = {"script": "/s/job.sh", "task": 0, "user": "me", "time": NOW - 1000}
ATTEMPT = {"started": NOW - 900, "launcher": "slurm", "host": "node1", "job_id": "7_0"}
SAVED = ATTEMPT | {"ended": NOW - 100, "step": 40, "reason": "SIGTERM", "state": "interrupted"}
RAISED = ATTEMPT | {"ended": NOW - 100, "error": "ValueError:\n two  lines"}
FAST = {"step_s": 0.5, "longest_step_s": 20.0, "doing": "an evaluation"}
SLOW = {"step_s": 45.0, "longest_step_s": 400.0, "doing": "an evaluation"}
BEAT = {"step": 50, "max_steps": 100, "time": NOW - 3, "stepped": NOW - 3, "steps_per_s": 2.0}
REQUEST = {"by": "ann", "time": NOW - 10}


@pytest.mark.parametrize(
    ("said", "attempts", "more", "expected", "reason"),
    [
        ("finished", [ATTEMPT], {}, "finished", ""),
        ("created", [], {"local": True}, "created", ""),
        # The job is in the queue.
        ("queued", [], {"job": job("PENDING", "Resources")}, "queued", "Resources"),
        ("queued", [], {"job": job("PENDING", "Priority", NOW + 60)}, "queued", "to start about"),
        ("queued", [SAVED], {"job": job("PENDING")}, "queued", "pending"),
        # A person has to do something.
        (
            "queued",
            [],
            {"job": job("PENDING", "launch failed requeued held", NOW + 60)},
            "queued",
            "launch failed requeued held: held until somebody releases it: scontrol release 7_0",
        ),
        (
            "running",
            [ATTEMPT],
            {"job": job("SUSPENDED"), "progress": BEAT},
            "running",
            "suspended until the cluster or its administrator resumes it: 7_0",
        ),
        ("queued", [], {"job": job("RUNNING", start=NOW - 5)}, "running", "starting"),
        ("created", [], {"job": job("PENDING", "Priority")}, "queued", "Priority"),
        ("running", [ATTEMPT], {"job": job("RUNNING"), "progress": BEAT}, "running", ""),
        ("running", [ATTEMPT], {"job": job("RUNNING")}, "running", "starting"),
        ("running", [ATTEMPT], {"job": job("COMPLETING")}, "running", "ending"),
        ("running", [ATTEMPT], {"job": job("PENDING", "BeginTime")}, "requeued", "BeginTime"),
        ("interrupted", [SAVED], {"job": job("PENDING", "BeginTime")}, "requeued", "BeginTime"),
        ("interrupted", [SAVED], {"job": job("REQUEUE_HOLD")}, "requeued", "requeue_hold"),
        # The run has saved and its job is still there. The job may just be requeued, so the run is
        # not yet called interrupted.
        ("interrupted", [SAVED], {"job": job("COMPLETING")}, "running", "saved at step 40, ending"),
        (
            "interrupted",
            [SAVED],
            {"job": job("RUNNING", start=NOW - 900)},
            "running",
            "saved at step 40, ending",
        ),
        ("interrupted", [SAVED], {"job": job("RUNNING", start=NOW - 9)}, "running", "starting"),
        ("failed", [RAISED], {"job": job("RUNNING", start=NOW - 900)}, "failed", "two lines"),
        ("failed", [RAISED], {"job": job("PENDING", "BeginTime")}, "requeued", "BeginTime"),
        # The job is out of the queue, and the run itself has noted how it ended.
        ("failed", [RAISED], {}, "failed", "ValueError: two lines"),
        ("interrupted", [SAVED], {}, "interrupted", "saved at step 40, SIGTERM"),
        (
            "interrupted",
            [SAVED],
            {"stop_request": REQUEST},
            "interrupted",
            "step 40, cancelled by ann",
        ),
        ("interrupted", [SAVED], {"ended": ended("TIMEOUT")}, "interrupted", "SIGTERM; TIMEOUT"),
        # The job is out of the queue, and the run has not noted how it ended.
        ("running", [ATTEMPT], {"ended": ended("OUT_OF_MEMORY")}, "lost", "OUT_OF_MEMORY"),
        ("running", [ATTEMPT], {"ended": ended("NODE_FAIL")}, "lost", "NODE_FAIL"),
        ("queued", [], {"ended": ended("FAILED")}, "lost", "FAILED, exit code 1:0"),
        ("queued", [], {"ended": ended("CANCELLED by 0")}, "cancelled", "CANCELLED by 0"),
        ("queued", [], {"stop_request": REQUEST}, "cancelled", "by ann"),
        (
            "running",
            [ATTEMPT],
            {"stop_request": REQUEST, "progress": BEAT},
            "cancelled",
            "after step 50",
        ),
        ("queued", [], {}, "lost", "no longer in the queue"),
        ("running", [ATTEMPT], {"progress": BEAT}, "lost", "on node1, after step 50"),
        ("queued", [], {"asked": NOW - 5, "unanswered": True}, "queued", "being submitted"),
        ("queued", [], {"asked": NOW - 99, "unanswered": True}, "lost", "no longer in the queue"),
        ("queued", [], {"asked": NOW - 5}, "lost", "no longer in the queue"),
        # The scheduler could not be asked, so only the run directory tells the state.
        ("queued", [], {"scheduler": False}, "queued", "squeue was not asked"),
        ("running", [ATTEMPT], {"scheduler": False, "progress": BEAT}, "running", ""),
        ("running", [ATTEMPT], {"scheduler": False}, "running", "squeue was not asked"),
        # The run was started without Slurm, or by slurm/train.sbatch.
        ("running", [ATTEMPT], {"local": True, "held": True, "progress": BEAT}, "running", ""),
        ("running", [ATTEMPT], {"local": True, "progress": BEAT}, "running", ""),
        (
            "running",
            [ATTEMPT],
            {"local": True, "progress": BEAT | {"time": NOW - 500}},
            "lost",
            "no process holds it on node1, after step 50",
        ),
        ("running", [ATTEMPT], {"local": True, "ended": ended("RUNNING")}, "running", "starting"),
        ("interrupted", [SAVED], {"local": True, "ended": ended("PENDING")}, "requeued", "None"),
        # The run is running.
        (
            "running",
            [ATTEMPT],
            {"job": job("RUNNING"), "progress": BEAT, "stop_request": REQUEST},
            "running",
            "asked to stop by ann",
        ),
        (
            "running",
            [ATTEMPT],
            {"job": job("RUNNING"), "progress": BEAT | {"stepped": NOW - 723}},
            "running",
            "no step for 12 min",
        ),
        (
            "running",
            [ATTEMPT],
            {"job": job("RUNNING"), "progress": BEAT | FAST | {"stepped": NOW - 103}},
            "running",
            "no step for 2 min: an evaluation is under way",
        ),
        (
            "running",
            [ATTEMPT],
            {"job": job("RUNNING"), "progress": BEAT | SLOW | {"stepped": NOW - 723}},
            "running",
            "",
        ),
        (
            "running",
            [ATTEMPT | {"started": NOW - 1}],
            {"job": job("RUNNING"), "progress": BEAT},
            "running",
            "starting",
        ),
    ],
)
def test_the_state_of_a_run(
    said: str, attempts: list[dict[str, Any]], more: dict[str, Any], expected: str, reason: str
) -> None:
    record: dict[str, Any] = {"state": said, "attempts": attempts}
    if not more.pop("local", False):
        record["submission"] = SUBMITTED | {"time": more.pop("asked", NOW - 1000)}
        more = {"scheduler": True} | more
    state = judge(facts_of(Path("/runs/x"), record, **more), NOW)
    assert (state.name, reason in state.reason) == (expected, True), state
    assert bool(reason) == bool(state.reason)


def test_mlflow_learns_only_of_runs_whose_jobs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, said: str = "running", **more: Any) -> Facts:
        attempts = [ATTEMPT | ({"error": "boom"} if said == "failed" else {})]
        record = {"state": said, "attempts": attempts, "submission": SUBMITTED}
        return facts_of(Path(name), record, **{"scheduler": True} | more)

    found = [
        *(run("lost", ended=ended("NODE_FAIL")), run("failed", "failed")),
        *(run("waits", job=job("PENDING")), run("runs", job=job("RUNNING"))),
        *(run("unknown", scheduler=False), run("held", held=True)),
    ]
    monkeypatch.setattr(state_module, "gather", lambda paths: found)
    assert ended_for_good([each.path for each in found]) == {
        Path("lost"): ("KILLED", "lost: NODE_FAIL"),
        Path("failed"): ("FAILED", "failed: boom"),
    }


def test_a_job_says_nothing_of_a_run_taken_up_in_a_terminal(tmp_path: Path, no_slurm: None) -> None:
    here = ATTEMPT | {"launcher": "single"}
    for name, attempt, expected in (
        ("a-00000001", ATTEMPT, ("running", "says run.json; squeue was not asked")),
        ("b-00000001", here, ("lost", "no process holds it on node1")),
    ):
        run = make_run(tmp_path, name, state="running", attempts=[attempt], submission=SUBMITTED)
        state = judge(gather([run])[0], NOW)
        assert (state.name, state.reason) == expected


def test_the_time_left() -> None:
    record = {"state": "running", "attempts": [ATTEMPT]}
    assert eta_s(facts_of(Path("x"), record, BEAT), NOW) == pytest.approx(50 / 2 - 3)
    # A run that hangs has none, although its heartbeat goes on.
    assert eta_s(facts_of(Path("x"), record, BEAT | FAST | {"stepped": NOW - 103}), NOW) is None
    # The heartbeat of the previous attempt is not used.
    record["attempts"] = [ATTEMPT | {"started": NOW}]
    assert eta_s(facts_of(Path("x"), record, BEAT), NOW) is None
    shown = [duration(s) for s in (45, 100, 5399, 12_000, 200_000)]
    assert shown == ["45 s", "2 min", "1 h 30 min", "3 h 20 min", "2 d 7 h"]


# Tests of which runs are selected


def test_which_runs_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("digits-00000001", "digits-00000001.1", "digits-00000023", "text-00000002")
    one, old, two, text = (make_run(tmp_path, name) for name in names)
    sweep = make_sweep(tmp_path, "2026-01-02_03-04-05_6", [two, one, tmp_path / "gone-00000009"])
    (tmp_path / "link-00000003").symlink_to(one)
    (tmp_path / "notes").mkdir()
    assert select(tmp_path, []) == [one, two, text]
    assert select(tmp_path, [], archived=True) == [one, old, two, text]
    assert select(tmp_path, ["text"]) == [text]
    assert select(tmp_path, ["digits-00000001"]) == [one]
    assert select(tmp_path, ["digits-00000001.1", "text", "text-0"]) == [old, text]
    for name in ("2026-01-02", str(sweep), "2026-01-02_03-04-05_6"):
        assert select(tmp_path, [name, "digits-00000001"]) == [two, one]
    monkeypatch.chdir(tmp_path)
    assert select(Path("elsewhere"), ["digits-00000023"]) == [two]  # given as a path
    with pytest.raises(ConfigError, match="digits: could be digits-00000001, digits-00000023"):
        select(tmp_path, ["digits"])
    assert select(tmp_path, ["digits"], several=True) == [one, two]
    with pytest.raises(ConfigError, match="digist-0: no run or sweep"):
        select(tmp_path, ["digist-0"], several=True)
    with pytest.raises(ConfigError, match=r"digist-0: no run or sweep .* did you mean digits-0000"):
        select(tmp_path, ["digist-0"])
    with pytest.raises(
        ConfigError, match="notes: this folder is no run and no sweep, and it holds"
    ):
        select(tmp_path, ["notes"])
    with pytest.raises(StorageError, match=r"none_such: no folder of runs .* --dir"):
        select(Path("none_such"), [])


def test_a_folder_of_runs_is_an_argument(
    tmp_path: Path,
    no_slurm: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = (make_run(tmp_path / "r", f"digits-0000000{n}") for n in (1, 2))
    make_run(tmp_path / "r", "digits-00000001.1")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert select(Path("runs"), ["r"]) == [old, new]
    assert len(select(Path("runs"), ["r"], archived=True)) == 3
    assert are_folders(["r"])
    assert not any(map(are_folders, ([], ["r", str(old)], ["runs"])))
    with pytest.raises(ConfigError, match="r: 2 runs, and logs takes one: digits-00000001, digits"):
        logs_module.main(["r"])
    assert status_module.main(["r", "--json"]) == checkpoints.main(["r"]) == gc.main(["r"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out.splitlines()[0])] == [
        str(old),
        str(new),
    ]
    assert cancel.main(["r"]) == resume.main(["r"]) == 0  # as with --all: nothing runs, none failed
    assert "nothing is queued or running" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="digits-00000001: gc looks through a folder of runs"):
        gc.main([str(old)])
    shutil.rmtree(new)
    assert one_run(Path("runs"), "r", "logs") == old


def test_a_sweep_whose_submission_was_cut_off_and_that_has_moved(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tasks = tmp_path / "sweeps" / "2026" / "array-0" / "tasks"
    tasks.parent.mkdir(parents=True)
    tasks.write_text(f"/before/it/moved/{run.name}\n")
    assert select(tmp_path, ["2026"]) == [run]


# Tests of the table


def status(folder: Path, *arguments: str) -> Any:
    done = run_module("hpctrain", "status", "--dir", str(folder), "--json", *arguments)
    return json.loads(done.stdout)


def test_status_of_runs_that_end_here(train: Train, tmp_path: Path, no_slurm: None) -> None:
    train("train.max_steps=3", "tracking=off")
    train("train.max_steps=3", "tracking=off", "model.dropout=7", code=2)
    (tmp_path / "runs" / "digits-0000000d").mkdir()
    (tmp_path / "runs" / "digits-0000000d" / "run.json").write_text("{")
    rows = {row["state"]: row for row in status(tmp_path / "runs")}
    assert rows.keys() == {"finished", "failed", "damaged"}
    finished, failed = rows["finished"], rows["failed"]
    assert (finished["step"], finished["max_steps"], finished["metric"]) == (3, 3, "val/accuracy")
    assert 0 <= finished["metrics"]["val/accuracy"] <= 1
    assert failed["reason"].startswith("ConfigError: model._target_")
    shown = run_module("hpctrain", "status", cwd=tmp_path).stdout
    assert "3 runs in runs" in shown
    assert "1 failed, 1 damaged, 1 finished" in shown
    # Their logs are kept, though they were started in a terminal.
    name = Path(finished["run"]).name
    log = run_module("hpctrain", "logs", name, cwd=tmp_path)
    assert f"{name}/logs/terminal_1.rank0.log <==" in log.stderr
    assert "step 3/3  loss" in log.stdout
    log = run_module("hpctrain", "logs", Path(failed["run"]).name, cwd=tmp_path)
    assert "rank 0 says:" in log.stdout
    assert "terminal_1.rank0.log" in log.stdout
    assert "error: model._target_" in log.stdout


def test_a_run_that_is_deleted_in_mlflow_says_so(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"digits-0000000{n}", state="finished") for n in range(6)]
    for run in runs[1:]:
        Uploaded("http://h:1", "u", "1", "2", 3, problem="the run is deleted").write(run)
    rows = [Row(facts, State("finished"), NOW) for facts in map(Facts.read, runs)]
    lines = drawn(rows, 400)
    cure = f"the run is deleted; then `python -m hpctrain sync {runs[1]}` uploads the rest"
    assert f"{runs[1].name}: {cure}" in lines
    assert lines[-1] == "… 2 more runs have such a problem (--json)"
    assert [row.facts()["upload_problem"] for row in rows[:2]] == ["", cure]
    assert Row(rows[1].run, State("running"), NOW).upload_problem == "the run is deleted"


def test_attempts_and_ranks_in_a_terminal_have_logs_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = list(logging.getLogger().handlers)

    def attempt(rank: int, error: Exception) -> None:
        with kept(run / "logs", "torchrun", rank):
            logging.getLogger("anywhere").warning("a line")
            raise error

    for rank, text in ((0, "first"), (0, "second"), (1, "beside")):
        with pytest.raises(ValueError, match=text):
            attempt(rank, ValueError(text))
    with pytest.raises(ConfigError):
        attempt(2, ConfigError("KEY=1: wrong"))
    with kept(run / "logs", "slurm", 3), kept(run / "absent" / "logs", "single", 3):
        assert logging.getLogger().handlers == before
    assert logging.getLogger().handlers == before
    logs = rank_logs(Facts.read(run))
    assert {rank: path.name for rank, path in logs.items()} == {
        0: "terminal_2.rank0.log",
        1: "terminal_1.rank1.log",
        2: "terminal_1.rank2.log",
    }
    assert logs[2].read_text().endswith("a line\nerror: KEY=1: wrong\n")
    assert "a line\nTraceback (most recent call last):\n" in logs[1].read_text()
    assert logs[0].read_text().endswith("\nValueError: second\n")


def test_names_and_errors_are_no_markup(tmp_path: Path, no_slurm: None) -> None:
    make_run(tmp_path, "[red]-00000001", state="failed", attempts=[{"error": "[/nope] [bold]x"}])
    shown = run_module("hpctrain", "status", "--dir", str(tmp_path)).stdout
    assert "[red]-00000001" in shown
    assert "[/nope] [bold]x" in shown


def test_a_long_table_shows_what_wants_attention(tmp_path: Path, no_slurm: None) -> None:
    for number in range(60):
        state = "failed" if number == 7 else "finished"
        attempts = [{"started": NOW + number, "ended": NOW + number + 90}]
        make_run(tmp_path, f"digits-{number:08x}", state=state, attempts=attempts)
    where = ("status", "--dir", str(tmp_path))
    shown = run_module("hpctrain", *where).stdout
    assert "60 runs" in shown
    assert "1 failed, 59 finished" in shown
    # The newest come first; the failed run is an old one.
    names = [int(word[7:], 16) for word in shown.split() if word.startswith("digits-")]
    assert names == [*range(59, 20, -1), 7]
    assert "... 20 more (--all, --json)" in shown
    assert run_module("hpctrain", *where, "--all").stdout.count("digits-") == 60
    assert len(status(tmp_path)) == 60


def test_watching_ends_by_itself_and_by_ctrl_c(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path, state="finished", attempts=[{}])
    where = ("status", "--dir", str(tmp_path), "--watch=2")
    assert run_module("hpctrain", *where).stdout.count("1 finished") == 1
    with RunDir(run).lock():
        (run / "run.json").write_text(json.dumps({"state": "running", "attempts": [ATTEMPT]}))
        command = [sys.executable, "-u", "-m", "hpctrain", *where]
        with ignoring_sigint():  # the command heeds Ctrl-C all the same
            watching = forkserver.Popen(command, stdout=subprocess.PIPE, text=True)
        with watching:
            assert watching.stdout is not None
            seen = ""
            while seen.count("1 running") < 2:
                seen += watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 0
    wrong = run_module("hpctrain", "status", "--watch", run.name, code=2)
    assert "give the run first" in wrong.stderr


def test_the_commands_import_nothing_heavy(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path)
    (run / "logs" / "1_0_log.out").write_text("hello\n")
    program = (
        "import sys; from hpctrain.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'mlflow', 'h5py', 'hydra', 'submitit'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    for command in (["status"], ["logs", run.name], ["cancel", "--all"], ["gc"]):
        given = [sys.executable, "-c", program, *command, "--dir", str(tmp_path)]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        asked = run_module("hpctrain", command[0], "--help", new=True).stdout
        assert f"usage: python -m hpctrain {command[0]}" in asked


# Tests of why a run failed

RANK_DIED = """\
Traceback (most recent call last):
  File "job.py", line 3, in train
    dist.all_reduce(total)
RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:9. GLHF!
"""
SHAPES = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "tasks.py", line 3, in __call__
[rank3]:     torch.zeros(2, 3) @ torch.zeros(2, 3)
[rank3]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: no x
in two lines
"""
KILLED = """\
srun: error: node2: tasks 0-3: Exited with exit code 9
slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: node1: task 0: Exited with exit code 1
srun: error: node2: task 3: Killed
"""
OOM = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some processes were killed\n"


def failed_run(folder: Path, logs: dict[int, str], batch: str = "") -> Facts:
    """Make a failed run; the ranks stop writing their logs in the order of `logs`."""
    run = make_run(
        folder, state="failed", submission=SUBMITTED | {"script": f"{folder}/sweeps/a/job.sh"}
    )
    (folder / "sweeps" / "a" / "batch").mkdir(parents=True)
    (folder / "sweeps" / "a" / "job_id").write_text("7\n")
    (folder / "sweeps" / "a" / "batch" / "7_0.log").write_text(batch)
    for place, (rank, text) in enumerate(logs.items()):
        path = run / "logs" / f"7_0.rank{rank}.log"
        path.write_text(text)
        os.utime(path, (NOW + place, NOW + place))
    return Facts.read(run)


@pytest.mark.parametrize(
    ("logs", "batch", "summary", "rank", "line"),
    [
        ({0: RANK_DIED, 3: SHAPES, 1: RANK_DIED}, KILLED, "mat1 and mat2 shapes", 3, 4),
        ({3: "step 1\n", 0: RANK_DIED}, KILLED, "node2: task 3: Killed", None, 5),
        ({0: RANK_DIED}, KILLED + OOM, "1 oom-kill event", None, 6),
        ({0: RANK_DIED}, "", "Connection closed by peer", 0, 4),
        (
            {0: RANK_DIED},
            "srun: error: node2: task 1: Exited with exit code 3\n" + KILLED.splitlines()[3],
            "task 1: Exited with exit code 3",
            None,
            1,
        ),
        ({1: CHAINED, 0: SHAPES}, "", "ValueError: no x", 1, 9),
        ({0: "step 1\nerror: data.path=x: gone\n"}, "", "error: data.path=x: gone", 0, 2),
        ({0: "", 1: ""}, "module: command not found\n", "module: command not found", None, 1),
        (
            {0: "slurmstepd-node2: error: execve(): /x/python: No such file or directory\n"},
            "srun: error: node2: task 0: Exited with exit code 2\n",
            "execve(): /x/python: No such file",
            0,
            1,
        ),
    ],
)
def test_the_error_is_found(
    tmp_path: Path, logs: dict[int, str], batch: str, summary: str, rank: int | None, line: int
) -> None:
    fault = find_fault(failed_run(tmp_path, logs, batch))
    assert fault is not None
    assert summary in fault.summary
    assert (fault.rank, fault.line) == (rank, line)
    assert summary in fault.file.read_text().splitlines()[fault.line - 1]


def test_logs_shows_the_error_where_it_stands(tmp_path: Path, no_slurm: None) -> None:
    run = failed_run(tmp_path, {0: RANK_DIED, 3: "step 1\n" * 100 + SHAPES})
    where = ("logs", run.name, "--dir", str(tmp_path))
    shown = run_module("hpctrain", *where).stdout
    file = run.path / "logs" / "7_0.rank3.log"
    assert "rank 3 says:" in shown
    assert f"{file}:104: RuntimeError: mat1 and mat2" in shown
    assert ">   104  [rank3]: RuntimeError" in shown
    error = json.loads(run_module("hpctrain", *where, "--json").stdout)["error"]
    assert (error["file"], error["line"], error["rank"]) == (str(file), 104, 3)
    # The log of a rank that is named is shown without changes.
    assert run_module("hpctrain", *where, "--rank", "0", "--lines", "4").stdout == RANK_DIED
    wrong = run_module("hpctrain", *where, "--rank", "7", code=6)
    assert "no rank 7; there are 0 to 3" in wrong.stderr


DAMAGED_CONFIGS = {
    "": "config.yaml: data.path is missing",
    "[]": "cannot be read as a frozen config (it has no keys)",
    "launch: [": "line 2: it is not YAML (while parsing a flow node",
    "garbage: 1": "config.yaml: unknown key garbage",
}


@pytest.mark.parametrize("content", DAMAGED_CONFIGS)
def test_a_damaged_config_is_named_in_one_line(
    tmp_path: Path, no_slurm: None, content: str
) -> None:
    facts = {"signature": "00000001", "data_digest": "x", "state": "interrupted"}
    run = make_run(tmp_path, **facts)
    (run / "config.yaml").write_text(content)
    for command in (["resume", "--dir", str(tmp_path)], ["run", str(run)]):
        done = run_module("hpctrain", *command, code=2)
        assert f"error: {run}/config.yaml: " in done.stderr
        assert DAMAGED_CONFIGS[content] in done.stderr
        assert done.stderr.count("\n") == 1
    (run / "config.yaml").unlink()
    done = run_module("hpctrain", "resume", "--dir", str(tmp_path), code=6)
    assert done.stderr == f"error: {run}: no run directory (config.yaml is missing)\n"


def test_a_damaged_run_json_hides_no_other_run(tmp_path: Path, no_slurm: None) -> None:
    good = make_run(tmp_path, "digits-00000001", state="finished")
    run = make_run(tmp_path, "digits-00000002")
    (run / "run.json").write_text("[]")
    where = ("--dir", str(tmp_path))
    rows = {row["run"]: row["state"] for row in status(tmp_path)}
    assert rows == {str(good): "finished", str(run): "damaged"}
    assert "scancel ends it" in run_module("hpctrain", "cancel", run.name, *where).stdout
    assert "it must be `object`" in run_module("hpctrain", "run", str(run), code=6).stderr
    (run / "run.json").write_text('{"state": "interrupted", "attempts": []}')
    for command in (["resume", *where], ["run", str(run)]):
        assert "it has no `signature`" in run_module("hpctrain", *command, code=6).stderr


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"state": ' + "[" * 100_000,
        '{"state": "failed", "attempts": 5}',
        '{"state": "running", "attempts": ["x"]}',
        '{"state": "failed", "attempts": [{"started": "x"}]}',
        '{"state": "running", "attempts": [{"started": 1, "hosts": 7}]}',
        '{"submission": [1]}',
        '{"state": "queued", "submission": {"script": [], "task": {}}}',
        '{"state": "finished", "result": {"val/loss": "x"}, "attempts": []}',
        '{"state": "finished", "swept": [[1]], "attempts": []}',
    ],
)
def test_strange_values_in_run_json_hide_no_other_run(
    content: str, tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path, "digits-00000001", state="finished")
    run = make_run(tmp_path, "digits-00000002")
    (run / "run.json").write_text(content)
    for more in ([], ["--json"]):
        assert status_module.main(["--dir", str(tmp_path), *more]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert rows[str(good)]["state"] == "finished"
    assert rows[str(run)]["state"] == "damaged"
    assert f"{run}" in rows[str(run)]["reason"]


def test_a_fifo_is_not_waited_for(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path, "digits-00000001", state="finished")
    run = make_run(tmp_path, "digits-00000002")
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    began = {"started": 1.0, "launcher": "slurm", "job_id": "7_0"}
    other = make_run(tmp_path, "digits-00000003", state="running", attempts=[began])
    submitted = {"script": f"{tmp_path}/array/job.sh", "task": 0, "user": "me", "time": 1.0}
    queued = make_run(tmp_path, "digits-00000004", state="queued", submission=submitted)
    ended = make_run(tmp_path, "digits-00000005", state="finished")
    (tmp_path / "array" / "batch").mkdir(parents=True)
    for folder in (other, ended):
        (folder / "journal").mkdir()
        for name in ("meta.json", "uploaded.json", "upload.lock", "events.jsonl"):
            os.mkfifo(folder / "journal" / name)
    Meta("sqlite:////x", "exp", "name", "uid").write(good)
    Uploaded("sqlite:////x", "uid", "1", "2", 0).write(good)
    os.mkfifo(good / "journal" / "events.jsonl")
    for fifo in (
        *(other / name for name in ("progress.json", "stop", "lock", "logs/7_0.rank0.log")),
        *(tmp_path / "array" / name for name in ("job_id", "batch/.log", "batch/7_0.log")),
    ):
        os.mkfifo(fifo)
    assert status_module.main(["--dir", str(tmp_path), "--json"]) == 0
    rows = {row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert rows[str(good)] == "finished"
    assert rows[str(run)] == "damaged"
    assert set(rows) == {str(path) for path in (good, run, other, queued, ended)}
    for path, more in ((other, []), (other, ["-f"]), (queued, [])):
        with pytest.raises(StorageError, match="no log yet"):
            logs_module.main([path.name, "--dir", str(tmp_path), *more])
    # A log that becomes a FIFO at the last moment is an error, too.
    with pytest.raises(OSError, match="not a regular file"):
        tail(other / "logs" / "7_0.rank0.log", 0)


def test_another_users_uploader_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, state="finished")
    Meta("sqlite:////x", "exp", "name", "uid").write(run)
    for name in ("upload.lock", "uploader.log"):
        (run / "journal" / name).touch()
    assert "its uploader has ended" in left_behind(run)
    # A mock, because the kernel lets root read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "upload.lock")
    assert left_behind(run) == ""


def test_a_folder_without_runs(tmp_path: Path, no_slurm: None) -> None:
    shown = run_module("hpctrain", "status", "--dir", str(tmp_path)).stdout
    assert shown.startswith(f"0 runs in {tmp_path}, ")
    assert status(tmp_path) == []


def test_names_are_whole_on_a_narrow_terminal() -> None:
    name = "digits-with-a-name-00000001"
    facts = facts_of(Path(name), {"state": "failed"}, BEAT, job_id="7_0")
    row = Row(facts, State("failed", "ValueError: " + "word " * 20), NOW)
    for width in (60, 80, 120):
        lines = drawn([row], width)
        assert max(map(len, lines)) <= width
        assert any(line.startswith(f"{name}  failed") and "50/100" in line for line in lines)
        assert lines[-1].endswith("word ...")


def test_the_reason_of_a_failed_run_has_no_lines_of_code() -> None:
    error = 'ConfigError: model._target_=a.B:\n odd  sizes\n  File "a.py", line 3, in f\n    f()'
    facts = facts_of(Path("a-00000001"), {"state": "failed", "attempts": [{"error": error}]}, {})
    assert judge(facts, NOW).reason == "ConfigError: model._target_=a.B: odd sizes"


def test_reason_and_metric_fit_into_80_columns() -> None:
    beat = {**BEAT, "metric": "val/accuracy", "metrics": {"val/accuracy": 0.98125}}
    facts = facts_of(Path("digits-3fa92c1b"), {"state": "interrupted"}, beat, job_id="1234567_10")
    rows = [
        Row(facts, State("interrupted", "saved at step 1200, preempted"), NOW),
        Row(facts_of(Path("digits-00000001"), {"state": "queued"}, {}), State("queued"), NOW),
    ]
    lines = drawn(rows, 80)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for shown in ("metric: val/accuracy", "  0.9812", "  50/100  ", "saved at"):
        assert shown in text, text


def test_what_runs_is_shown_first_and_on_every_terminal() -> None:
    def row(number: int, state: str) -> Row:
        facts = facts_of(
            Path(f"digits-{number:08x}"), {"attempts": [{"started": NOW + number}]}, {}
        )
        return Row(facts, State(state), NOW + 99)

    rows = [row(1, "failed"), row(2, "running"), *(row(n, "finished") for n in range(3, 50))]
    for most in (4, 40):
        words = " ".join(drawn(rows, 100, most)).split()
        names = [int(word[7:], 16) for word in words if word.startswith("digits-")]
        assert names == [2, *range(49, 51 - most, -1), 1]


def test_swept_values_time_and_best_value_are_shown() -> None:
    attempts = [{"started": NOW - 900, "ended": NOW - 300}, {"started": NOW - 180, "nodes": 3}]
    attempts[1] |= {"host": "node7", "hosts": []}  # torchrun tells no rank the other hosts
    beat = {**BEAT, "metric": "val/mse", "metrics": {"val/mse": 0.5}}
    beat["best"] = {"value": 0.25, "step": 40}
    record = {"attempts": attempts, "swept": ["optimizer.lr=0.1", "seed=2"]}
    row = Row(facts_of(Path("digits-00000001"), record, beat), State("running"), NOW)
    cells = dict(zip(status_module._COLUMNS, map(str, row.cells("val/mse")), strict=True))
    assert (cells["swept"], cells["time"]) == ("lr=0.1 seed=2", "13 min")
    assert (cells["metric"], cells["best"], cells["node"]) == ("0.5", "0.25", "node7 +2")
    facts = row.facts()
    assert facts["swept"] == ("optimizer.lr=0.1", "seed=2")
    assert facts["best"] == {"value": 0.25, "step": 40}
    assert facts["duration_s"] == 780
    # An attempt that was killed has lasted until its last heartbeat.
    assert Row(row.run, State("lost"), NOW).facts()["duration_s"] == 600 + 177


def test_attempts_that_were_killed_have_taken_time(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    now = time.time()
    signs = samples.Writer(samples.folder(run.path) / "n01.jsonl")
    # Killed after 240 s, at the start-up after 60 s, and before anything was heard of it.
    for begun_s, heartbeat_s, sample_s in ((1000, 760, 770), (500, None, 440), (200, None, None)):
        run.begin_attempt(host="n01")
        content = run_json(run.path)
        content["attempts"][-1]["started"] = now - begun_s
        (run.path / "run.json").write_text(json.dumps(content))
        if heartbeat_s:
            beat = BEAT | {"time": now - heartbeat_s}
            (run.path / "progress.json").write_text(json.dumps(beat))
        if sample_s:
            signs.write(now - sample_s, metrics={"cpu_utilization_percentage": 1.0})
    signs.close()
    facts = Facts.read(run.path)
    assert facts.trained_s(None) == pytest.approx(240 + 60, abs=0.01)
    assert facts.trained_s(now) == pytest.approx(240 + 60 + 200, abs=0.01)
    (account,) = read([run.path])
    assert [round(span.end - span.begin) for span in account.spans] == [240, 60, 0]


def test_watching_on_a_terminal_waits_for_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = [[], ["created"], ["queued"], ["running"], ["finished"]]
    looks = iter(states)
    facts = facts_of(Path("digits-00000001"), {"state": "queued"}, {})

    def look(options: Any) -> list[Row]:
        return [Row(facts, State(name), NOW) for name in next(looks)]

    monkeypatch.setattr(status_module, "look", look)
    later = tmp_path / "runs"
    monkeypatch.setattr(status_module.time, "sleep", lambda seconds: later.mkdir(exist_ok=True))
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    console = Console(width=200, force_terminal=True)
    monkeypatch.setattr(status_module, "Console", lambda: console)
    assert status_module.main(["--dir", str(later), "--watch"]) == 0
    assert next(looks, None) is None  # `logs -f` went on until the run had ended
    assert f"there is no folder {later} yet" in shown.getvalue()
    assert "nothing is queued or running yet" in shown.getvalue()
    # A run that is named is watched until it has ended, even if it has.
    looks = iter([["finished"]])
    assert status_module.main(["digits-00000001", "--dir", str(tmp_path), "--watch"]) == 0


def test_what_is_printed_may_go_nowhere_or_to_an_old_terminal(
    tmp_path: Path, no_slurm: None
) -> None:
    make_run(tmp_path, state="failed", attempts=[{"error": "Fehler: über"}])
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = run_module("hpctrain", "status", "--dir", str(tmp_path), **old).stdout
    assert "\\xfcber" in shown
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hpctrain", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_line_numbers_of_a_huge_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1, 700_001)))
    log = tail(path, 0)
    assert 1 < len(log.lines) < 700_000
    assert log.lines[-1] == f"line {log.first + len(log.lines) - 1}"


def test_the_end_of_a_log_that_is_longer_than_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(64 << 30)  # a hole, which takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d\n" % number for number in range(30_000)))
    tracemalloc.start()
    try:
        begin = _start(path, 20_000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    with path.open("rb") as file:
        file.seek(begin)
        assert file.readline() == b"line 10000\n"


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_which_lines_are_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(logs_module, "_BLOCK", block)
    path = tmp_path / "log"
    texts = (b"", b"\n", b"a", b"a\nbc\n", b"a\r\nb\rc\r\n\r\nd", b"a\r", b"\r\n\r\n\r\nx\n\r")
    for text in texts:
        path.write_bytes(text)
        for count in range(8):
            kept = b"".join(text.splitlines(keepends=True)[-count:]) if count else b""
            assert text[_start(path, count) :] == kept, (text, count)


def test_logs_needs_one_run_with_a_log(tmp_path: Path, no_slurm: None) -> None:
    here = {"launcher": "single", "host": "login1"}
    make_run(tmp_path, state="finished", attempts=[here])
    where = ("--dir", str(tmp_path))
    done = run_module("hpctrain", "logs", "digits", *where, code=6)
    assert "started in a terminal on login1" in done.stderr
    assert "logs needs a run" in run_module("hpctrain", "logs", *where, code=2).stderr


# Tests of runs that train on this machine


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
        (row,) = status(tmp_path / "runs")
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
    (row,) = status(tmp_path / "runs")
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
    (row,) = status(tmp_path / "runs")
    assert row["state"] == "lost"
    assert "no process holds it on" in row["reason"]


@pytest.mark.slow
def test_logs_of_submitits_local_jobs(train: Train, tmp_path: Path, no_slurm: None) -> None:
    size = ("train.max_steps=5", "launch.tasks_per_node=2")
    train("-m", "seed=1", *size, "tracking=off", "launch.snapshot=off")
    (run,) = runs(tmp_path / "runs")
    shown = run_module("hpctrain", "logs", run.name, cwd=tmp_path)
    assert "step 5/5" in shown.stdout
    assert "_0_log.out <==" in shown.stderr
    assert (
        "_1_log.out <=="
        in run_module("hpctrain", "logs", "digits", "--rank=1", cwd=tmp_path).stderr
    )


def test_looking_at_the_lock_takes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not RunDir(run).is_locked()
    assert not (run / "lock").exists()
    with RunDir(run).lock():
        assert RunDir(run).is_locked()
        said = (run / "lock").read_text()
        assert str(os.getpid()) in said
    assert not RunDir(run).is_locked()
    assert (run / "lock").read_text() == said


def test_who_may_only_read_a_run_cannot_lock_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = os.umask(0o027)  # HPCTRAIN_UMASK=027: the group may read
    try:
        with RunDir(run).lock():
            RunDir(run).update(state="running")
            with file_lock(run / "other.lock", lambda: None):
                modes = {path.name: path.stat().st_mode & 0o777 for path in run.glob("*lock")}
    finally:
        os.umask(before)
    assert modes == {"lock": 0o600, ".run.json.lock": 0o600, "other.lock": 0o600}
    # A lock that an older release has made is mended; who may write may also lock.
    for mode, mended in ((0o644, 0o600), (0o660, 0o660), (0o666, 0o666), (0o664, 0o660)):
        (run / "lock").chmod(mode)
        with RunDir(run).lock():
            assert (run / "lock").stat().st_mode & 0o777 == mended


def test_who_holds_a_run_is_not_guessed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with subprocess.Popen(["true"]) as process:
        gone = process.pid
    here = socket.gethostname()
    for text, said in (
        ("", "in use by another process"),
        (f"process {os.getpid()} on {here}\n", f"in use by process {os.getpid()} on {here}:"),
        (f"process {gone} on elsewhere\n", f"in use by process {gone} on elsewhere:"),
        (f"process {gone} on {here}\n", f"but not by process {gone} on {here}, which has ended"),
    ):
        with (run / "lock").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(text)
            file.flush()
            with pytest.raises(StorageError, match=said):
                RunDir(run).check_unlocked()


def test_the_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.training.progress_file.EVERY_S", 0.05)
    file = tmp_path / "progress.json"
    beat = ProgressFile(Display(), file, "val/loss")
    beat.start(10, 100)
    for step in range(11, 31):
        time.sleep(0.02)
        beat.advance(step)
    beat.report(30, {"val/loss": 0.5})
    with beat.doing("an evaluation"):
        while json.loads(file.read_text())["doing"] != "an evaluation":
            time.sleep(0.02)
    beat.close()
    content = json.loads(file.read_text())
    assert content["longest_step_s"] >= content["step_s"] >= 0.02
    assert content["doing"] == ""
    assert (content["step"], content["max_steps"], content["metric"]) == (30, 100, "val/loss")
    assert content["metrics"] == {"val/loss": 0.5}
    assert 0 < content["steps_per_s"] < 60  # each step sleeps for 0.02 s
    assert content["stepped"] <= content["time"]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_the_best_value_outlives_a_restart_unless_its_step_is_made_again(tmp_path: Path) -> None:
    def best(metric: str, first: int, values: dict[int, float]) -> Any:
        beat = ProgressFile(Display(), tmp_path / "progress.json", metric)
        beat.start(first, 100)
        for step, value in values.items():
            beat.report(step, {metric: value, "train/loss": 0.0})
        beat.close()
        return json.loads((tmp_path / "progress.json").read_text())["best"]

    first = best("val/loss", 0, {10: 0.5, 20: 0.3, 30: math.nan, 40: 0.4})
    assert first == {"value": 0.3, "step": 20}
    assert best("val/loss", 25, {30: 0.35}) == {"value": 0.3, "step": 20}
    assert best("val/loss", 10, {20: 0.4}) == {"value": 0.4, "step": 20}
    assert best("val/accuracy", 20, {30: 0.7, 40: 0.6}) == {"value": 0.7, "step": 30}
    assert best("val/width", 40, {50: 0.7}) is None  # the name tells no direction


def test_a_pulse_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    beat = ProgressFile(Display(), tmp_path / "gone" / "progress.json", "x")
    beat.start(0, 1)
    beat.advance(1)
    beat.close()


def test_the_stop_file_is_seen(tmp_path: Path) -> None:
    stop_request.write(tmp_path, "me")
    request = stop_request.read(tmp_path)
    assert request is not None
    assert time.time() - request.time < 60
    # After a new submission the stop request is void.
    assert stop_request.read(tmp_path, since=time.time() + 1) is None
    with Stop() as stop:
        stop.watch(stop_request.stop_file(tmp_path))
        end = time.monotonic() + 60
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.asked == "cancel"
    stop_request.clear(tmp_path)
    stop_request.clear(tmp_path)
    assert stop_request.read(tmp_path) is None
    stop_request.stop_file(tmp_path).touch()  # a user may do it by hand
    assert stop_request.read(tmp_path) is not None


def test_array_tasks_in_one_word() -> None:
    ids = ["7_3", "9_0", "7_1", "7_2", "7_9", "12"]
    assert jobs_of(ids) == ["12", "7_[1-3,9]", "9_[0]"]


# Tests of what can be deleted


def old(path: Path, text: str = "x") -> Path:
    """Write a file that was last changed 30 days ago; its folder gets the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for place in (path, path.parent):
        os.utime(place, (time.time() - 30 * 86400,) * 2)
    return path


def make_checkpoint(run: Path, step: int, *, whole: bool = True) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    (folder / "__0_0.distcp").write_text("12345")
    files = {"__0_0.distcp": {"bytes": 5 if whole else 6, "xxh3_128": ""}}
    Manifest(step, 1, {}, files, NOW, {}).write(folder)
    return folder


def found(folder: Path, **flags: Any) -> set[tuple[str, str]]:
    given: dict[str, Any] = {"keep_checkpoints": 1, "code": False, "archived": False}
    given |= {"debug": False, "functions": False}
    options = argparse.Namespace(**({"dir": folder} | given | flags))
    return {(item.kind, str(item.path.relative_to(folder))) for item in gc.find(options)}


def test_what_can_be_deleted(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "runs"
    done = make_run(folder, "digits-00000001", state="finished", code="a" * 16)
    for step in (10, 20, 30):
        make_checkpoint(done, step)
    make_checkpoint(done, 40, whole=False)
    half = make_run(folder, "digits-00000002", state="interrupted", attempts=[SAVED], code="b" * 16)
    for step in (10, 20):
        make_checkpoint(half, step)
    old(half / ".config.yaml.node1.123")
    (half / ".run.json.node1.124").touch()  # changed just now
    (half / "checkpoints" / "step-00000030.tmp").mkdir()
    queue = make_run(folder, "digits-00000003", state="queued", submission=SUBMITTED, code="b" * 16)
    old(queue / ".config.yaml.node1.123")
    (queue / "checkpoints" / "step-00000030.tmp").mkdir()
    make_run(folder, "digits-00000001.1", state="finished", code="c" * 16)
    make_run(folder, "debug-00000004", state="finished", code="a" * 16)
    for snapshot in ("a" * 16, "b" * 16, "c" * 16, "unused"):
        old(folder / "code" / snapshot / "a.py")
    (folder / "code" / "new").mkdir()  # a submission may still be writing it
    outside = make_run(tmp_path / "elsewhere", state="finished")
    make_checkpoint(outside, 1)
    make_checkpoint(outside, 2)
    (folder / "link-00000005").symlink_to(outside)
    (folder / "code" / "link").symlink_to(outside)
    for stamp, run in (("gone", tmp_path / "gone-00000001"), ("here", half)):
        sweep = make_sweep(folder, stamp, [run])
        os.utime(sweep, (0, 0))

    superfluous = {("checkpoint", f"{done.name}/checkpoints/step-000000{s}") for s in (10, 20)}
    safe = superfluous | {
        ("temporary", f"{half.name}/.config.yaml.node1.123"),
        ("temporary", f"{half.name}/checkpoints/step-00000030.tmp"),
        ("sweep", "sweeps/gone"),
        ("code", "code/unused"),
    }
    assert found(folder) == safe
    assert found(folder, keep_checkpoints=3) == safe - superfluous
    asked = {("archived", "digits-00000001.1"), ("debug", "debug-00000004")}
    asked |= {("code", f"code/{letter * 16}") for letter in "ac"}
    assert found(folder, code=True, archived=True, debug=True) == safe | asked

    before = sorted(folder.rglob("*"))
    shown = run_module("hpctrain", "gc", cwd=tmp_path).stdout
    assert "nothing was deleted: add --delete" in shown
    assert sorted(folder.rglob("*")) == before
    shown = run_module("hpctrain", "gc", "--delete", "--code", "--archived", cwd=tmp_path).stdout
    assert "deleted: 9, " in shown
    assert found(folder) == set()
    assert sorted(path.name for path in (done / "checkpoints").iterdir()) == [
        "step-00000030",
        "step-00000040",
    ]
    assert sorted(path.name for path in (folder / "code").iterdir()) == ["b" * 16, "link", "new"]
    assert sorted(path.name for path in (outside / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
    assert (queue / ".config.yaml.node1.123").exists()
    assert not list(folder.rglob(".gc-*"))


def test_jobs_of_functions_that_are_over(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "functions"
    for name, module in (
        *(("check", "hpctrain.doctor.node_job"), ("new", "hpctrain.doctor.node_job")),
        *(("waits", "hpctrain.doctor.node_job"), ("own", "my_code"), ("lost", "my_code")),
    ):
        (folder / name / "results").mkdir(parents=True)
        (folder / name / "call.json").write_text(json.dumps({"module": module}))
        if name not in ("waits", "lost"):
            old(folder / name / "results" / "0.json")
    (folder / "new" / "results" / "1.json").touch()  # another rank has just ended
    for name in ("check", "new", "own", "lost"):
        os.utime(folder / name, (0, 0))
    assert found(tmp_path) == {("check", "functions/check")}
    own = {("function", "functions/own"), ("function", "functions/lost")}
    assert found(tmp_path, functions=True) == {("check", "functions/check")} | own


def test_what_is_in_use_is_not_deleted(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path / "runs", state="finished", attempts=[ATTEMPT])
    make_checkpoint(run, 1)
    make_checkpoint(run, 2)
    with RunDir(run).lock():
        done = run_module("hpctrain", "gc", "--delete", cwd=tmp_path, code=6)
    assert "is in use by process" in done.stderr
    assert "1 of 1 could not be deleted" in done.stderr
    assert (run / "checkpoints" / "step-00000001").exists()
    # A folder that an earlier gc left half removed is deleted first.
    (run / "checkpoints" / ".gc-step-00000000").mkdir()
    done = run_module("hpctrain", "gc", "--delete", "--json", cwd=tmp_path)
    assert [row["deleted"] for row in json.loads(done.stdout)] == [True, True]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]


# Tests of the list of checkpoints


def test_checkpoints_are_listed_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, state="finished")
    (run / "progress.json").write_text('{"metric": "val/loss"}')
    metrics = {"val/loss": 0.25, "train/epoch": 3, "train/loss": math.nan}
    for step in (10, 20):
        folder = make_checkpoint(run, step)
        files = {"__0_0.distcp": {"bytes": 5, "xxh3_128": digest(folder / "__0_0.distcp")}}
        made = Manifest(step, 4, {"metrics": metrics}, files, NOW, {"dp_shard": 2, "tp": 2})
        made.write(folder)
    where = (run.name, "--dir", str(tmp_path))
    assert checkpoints.main([*where, "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run.name}: 2 checkpoints, 10 bytes\n")
    for said in ("4 (dp_shard 2, tp 2)", "latest", "spare", "val/loss", " 0.25 ", "intact"):
        assert said in shown
    newest, before = run / "checkpoints" / "step-00000020", run / "checkpoints" / "step-00000010"
    (newest / "__0_0.distcp").write_text("12346")
    old(before / "manifest.json", (before / "manifest.json").read_text().replace('"tp"', '"cp"'))
    assert checkpoints.main([*where, "--verify"]) == 1
    said = capsys.readouterr().err
    assert f"{newest}: the content of __0_0.distcp has changed" in said
    assert f"{before}: manifest.json is damaged: it does not fit its digest" in said
    assert checkpoints.main([*where, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["epoch"], row["ranks"], row["kept"]) for row in rows] == [
        (20, 3, 4, "latest"),
        (10, None, None, "spare"),
    ]
    assert rows[0]["layout"] == {"dp_shard": 2, "tp": 2}
    assert (rows[0]["metric"], rows[0]["metrics"]["train/loss"]) == ("val/loss", None)
    assert (rows[0]["problem"], rows[0]["bytes"]) == (None, 5)
    with pytest.raises(ConfigError, match="no run or sweep of that name"):
        checkpoints.main(["nothing", "--dir", str(tmp_path)])
    make_run(tmp_path / "empty")
    assert checkpoints.main(["--dir", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == "no checkpoints here\n"


@pytest.mark.slow
def test_looking_at_a_run_runs_no_code_that_its_config_names(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
        "def net(**_): raise SystemExit(3)\n"
    )
    run_module(
        *("hpctrain", "freeze", "experiment=digits", f"data.path={digits}"),
        *(f"output_dir={tmp_path}/runs", "model._target_=evil.net", "tracking=off"),
        cwd=tmp_path,
    )
    (run,) = runs(tmp_path / "runs")
    where = ("--dir", str(tmp_path / "runs"))
    record = run_json(run) | {"state": "failed", "attempts": [{"error": "x", "started": 1.0}]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "logs").mkdir()
    (run / "logs" / "terminal_1.rank0.log").write_text("x\n")
    for command in (["status"], ["logs", run.name], ["checkpoints"], ["gc", "--debug"]):
        run_module("hpctrain", *command, *where, cwd=tmp_path)
    run_module("hpctrain", "cancel", run.name, *where, cwd=tmp_path)
    run_module("hpctrain", "sync", str(run), code=7, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    run_module("hpctrain", "run", str(run), code=3, cwd=tmp_path)
    assert (tmp_path / "ran").exists()
