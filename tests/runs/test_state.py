"""The state of a run, from its directory and the scheduler."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.files.record import convert
from hpctrain.base.names.run_record import Hang, RunRecord
from hpctrain.base.units import duration
from hpctrain.cluster.slurm.queue import Ended, Job, Queue
from hpctrain.commands import state as state_module
from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.state import ended_for_good, eta_s, state_of
from hpctrain.runs.state.shared_job import job_of
from hpctrain.tracking.journal import Journal
from tests.made_runs import (
    ATTEMPT,
    BEAT,
    FAST,
    NOW,
    RAISED,
    REQUEST,
    SAVED,
    SLOW,
    SUBMITTED,
    facts_of,
    make_run,
)


def job(state: str, reason: str = "None", start: float | None = None) -> Job:
    when = "N/A" if start is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start))
    return Job("7_0", state, reason, "" if state == "PENDING" else "node1", when)


def ended(state: str) -> Ended:
    return Ended(state, "1:0", "None", "node1")


RUNS = job("RUNNING")
OLD = {"job": job("RUNNING", start=NOW - 900)}
BEATS: dict[str, Any] = {"job": RUNS, "progress": BEAT}
HELD = "launch failed requeued held"
FREE = f"{HELD}: held until somebody releases it: scontrol release 7_0"
SUSPENDED = "suspended until the cluster or its administrator resumes it: 7_0"
LINK = {"job": job("PENDING", "Priority"), "job_id": "7_0", "chain": ("6", "7", "8")}
SLEEPS = "no step for 2 min: an evaluation is under way"
GONE = "no process holds it on node1, after step 50"
YOUNG = [ATTEMPT | {"started": NOW - 1}]
LATE = BEAT | {"stepped": NOW - 723}
ASLEEP = BEAT | FAST | {"stepped": NOW - 103}
HANG = Hang(sentence="rank 1 hangs", rank=1, host="n1", state="stopped", time=NOW - 600)
HANGS: dict[str, Any] = {"hang": HANG}
STUCK = SAVED | {"ended": NOW - 200, "avoid": ["node2"]}
ATTEMPTS = {"running": ATTEMPT, "finished": ATTEMPT, "interrupted": SAVED, "failed": RAISED}


@pytest.mark.parametrize(
    ("said", "expected", "reason", "more"),
    [
        ("finished", "finished", "", {}),
        ("created", "created", "", {"local": True}),
        # The job is in the queue.
        ("queued", "queued", "Resources", {"job": job("PENDING", "Resources")}),
        ("queued", "queued", "to start about", {"job": job("PENDING", "Priority", NOW + 60)}),
        ("queued", "queued", "pending", {"attempts": [SAVED], "job": job("PENDING")}),
        # A person has to do something.
        ("queued", "queued", FREE, {"job": job("PENDING", HELD, NOW + 60)}),
        ("running", "running", SUSPENDED, {"job": job("SUSPENDED"), "progress": BEAT}),
        ("queued", "running", "starting", {"job": job("RUNNING", start=NOW - 5)}),
        ("created", "queued", "Priority", {"job": job("PENDING", "Priority")}),
        ("running", "running", "", BEATS),
        ("running", "running", "starting", {"job": RUNS}),
        ("running", "running", "ending", {"job": job("COMPLETING")}),
        ("running", "requeued", "BeginTime", {"job": job("PENDING", "BeginTime")}),
        ("interrupted", "requeued", "BeginTime", {"job": job("PENDING", "BeginTime")}),
        ("interrupted", "requeued", "requeue_hold", {"job": job("REQUEUE_HOLD")}),
        # The second job of a chain.
        ("interrupted", "requeued", "link 2 of 3 waits: Priority", LINK),
        ("queued", "queued", "Priority", {"job": job("PENDING", "Priority"), "chain": ("7",)}),
        # The run has saved and its job is still there. The job may just be requeued, so the run is
        # not yet called interrupted.
        ("interrupted", "running", "saved at step 40, ending", {"job": job("COMPLETING")}),
        ("interrupted", "running", "saved at step 40, ending", OLD),
        ("interrupted", "running", "starting", {"job": job("RUNNING", start=NOW - 9)}),
        ("failed", "failed", "two lines", OLD),
        ("failed", "requeued", "BeginTime", {"job": job("PENDING", "BeginTime")}),
        # The job is out of the queue, and the run itself has noted how it ended.
        ("failed", "failed", "ValueError: two lines", {}),
        ("interrupted", "interrupted", "saved at step 40, SIGTERM", {}),
        # By the name of its cause, and with what it has spent of its budget.
        (
            *("interrupted", "interrupted", "saved at step 40, preempted: SIGTERM"),
            {"attempts": [SAVED | {"cause": "preempted"}]},
        ),
        (
            *("failed", "failed", "quota: OSError: [Errno 122] Full"),
            {"attempts": [RAISED | {"error": "OSError: [Errno 122] Full", "cause": "quota"}]},
        ),
        ("running", "running", "restart 2 of 3", {"job": RUNS, "restarted": "restart 2 of 3"}),
        ("interrupted", "interrupted", "saved at step 40, SIGTERM; no job waits: `resume`", {}),
        ("interrupted", "interrupted", "saved at step 40, SIGTERM", {"scheduler": False}),
        ("interrupted", "interrupted", "step 40, cancelled by ann", {"stop_request": REQUEST}),
        ("interrupted", "interrupted", "SIGTERM; TIMEOUT; no job", {"ended": ended("TIMEOUT")}),
        # The job is out of the queue, and the run has not noted how it ended.
        ("running", "lost", "OUT_OF_MEMORY", {"ended": ended("OUT_OF_MEMORY")}),
        ("running", "lost", "NODE_FAIL", {"ended": ended("NODE_FAIL")}),
        ("queued", "lost", "FAILED, exit code 1:0", {"ended": ended("FAILED")}),
        ("queued", "cancelled", "CANCELLED by 0", {"ended": ended("CANCELLED by 0")}),
        ("queued", "cancelled", "by ann", {"stop_request": REQUEST}),
        ("running", "cancelled", "after step 50", {"stop_request": REQUEST, "progress": BEAT}),
        ("queued", "lost", "no longer in the queue", {}),
        ("running", "lost", "on node1, after step 50", {"progress": BEAT}),
        ("queued", "queued", "being submitted", {"asked": NOW - 5, "unanswered": True}),
        ("queued", "lost", "no longer in the queue", {"asked": NOW - 99, "unanswered": True}),
        ("queued", "lost", "no longer in the queue", {"asked": NOW - 5}),
        # The scheduler could not be asked, so only the run directory tells the state.
        ("queued", "queued", "squeue was not asked", {"scheduler": False}),
        ("running", "running", "", {"scheduler": False, "progress": BEAT}),
        ("running", "running", "squeue was not asked", {"scheduler": False}),
        # The run was started without Slurm, or by slurm/train.sbatch.
        ("running", "running", "", {"local": True, "held": True, "progress": BEAT}),
        ("running", "running", "", {"local": True, "progress": BEAT}),
        ("running", "lost", GONE, {"local": True, "progress": BEAT | {"time": NOW - 500}}),
        ("running", "running", "starting", {"local": True, "ended": ended("RUNNING")}),
        ("interrupted", "requeued", "None", {"local": True, "ended": ended("PENDING")}),
        # The run is running.
        ("running", "running", "asked to stop by ann", BEATS | {"stop_request": REQUEST}),
        ("running", "running", "no step for 12 min", BEATS | {"progress": LATE}),
        # What the observers say stands before what follows from it, until the rank gets on.
        ("running", "running", "rank 1 hangs; no step", BEATS | {"progress": LATE} | HANGS),
        ("running", "running", "", BEATS | HANGS),
        ("failed", "failed", "rank 1 hangs; ValueError: two", {} | HANGS),
        ("failed", "requeued", "BeginTime", {"job": job("PENDING", "BeginTime")} | HANGS),
        ("running", "running", SLEEPS, {"job": RUNS, "progress": ASLEEP}),
        ("running", "running", "", {"job": RUNS, "progress": LATE | SLOW}),
        ("running", "running", "starting", BEATS | {"attempts": YOUNG}),
    ],
)
def test_the_state_of_a_run(said: str, expected: str, reason: str, more: dict[str, Any]) -> None:
    more = dict(more)
    usual = [ATTEMPTS[said]] if said in ATTEMPTS else []
    record: dict[str, Any] = {"state": said, "attempts": more.pop("attempts", usual)}
    if not more.pop("local", False):
        record["submission"] = SUBMITTED | {"time": more.pop("asked", NOW - 1000)}
        more = {"scheduler": True} | more
    state = state_of(facts_of(Path("/runs/x"), record, **more), NOW)
    assert (state.name, reason in state.reason) == (expected, True), state
    assert bool(reason) == bool(state.reason)


def test_the_budget_is_read_with_the_newest_checkpoint(tmp_path: Path) -> None:
    killed = ATTEMPT | {"cause": "rank killed", "verdict": "restart", "first_step": 4}
    run = make_run(tmp_path, state="running", attempts=[killed, killed, killed])
    for step, told in ((4, "restart 2 of 3 without a new checkpoint"), (6, "")):
        (run / "checkpoints" / f"step-{step:08d}").mkdir()
        assert Facts.read(run).restarted == told


@pytest.mark.parametrize(
    ("where", "logged", "expected"),
    [
        ("dead", True, ("lost", "no process holds it on {}, after step 590")),
        ("dead", False, ("lost", "no process holds it on {}, after step 500")),
        ("alive", True, ("running", "")),
        ("elsewhere", True, ("running", "")),
    ],
)
def test_a_run_that_could_write_nothing_more(
    tmp_path: Path, where: str, logged: bool, expected: tuple[str, str]
) -> None:
    """The disk is full, or the directory was moved away: progress.json is of an early step."""
    with subprocess.Popen(["true"]) as process:
        pid = os.getpid() if where == "alive" else process.pid
    host = "n1" if where == "elsewhere" else socket.gethostname()
    now = time.time()
    attempt = ATTEMPT | {"started": now - 9, "host": host, "pid": pid}
    run = make_run(tmp_path, state="running", attempts=[attempt])
    (run / "progress.json").write_text(json.dumps({"step": 0, "time": now - 8, "stepped": now - 8}))
    (run / "checkpoints" / "step-00000500").mkdir()
    if logged:
        journal = Journal(run)
        journal.append("metrics", step=590, metrics={})
        journal.close()
    (found,) = gather([run])
    state = state_of(found, now)
    assert (state.name, state.reason) == (expected[0], expected[1].format(host))
    assert state_module.step(found) == (590 if logged else 500)


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
        state = state_of(gather([run])[0], NOW)
        assert (state.name, state.reason) == expected


def test_the_time_left() -> None:
    record = {"state": "running", "attempts": [ATTEMPT]}
    assert eta_s(facts_of(Path("x"), record, BEAT), NOW) == pytest.approx(50 / 2 - 3)
    # A run that hangs has none, although its heartbeat goes on.
    assert eta_s(facts_of(Path("x"), record, BEAT | FAST | {"stepped": NOW - 103}), NOW) is None
    # The heartbeat of the previous attempt is not used.
    record["attempts"] = [ATTEMPT | {"started": NOW}]
    assert eta_s(facts_of(Path("x"), record, BEAT), NOW) is None
    shown = [duration(s) for s in (0, 0.0125, 45, 100, 5399, 12_000, 200_000)]
    assert shown == ["0 s", "0.013 s", "45 s", "2 min", "1 h 30 min", "3 h 20 min", "2 d 7 h"]


def test_the_reason_of_a_failed_run_has_no_lines_of_code() -> None:
    error = 'ConfigError: model._target_=a.B:\n odd  sizes\n  File "a.py", line 3, in f\n    f()'
    facts = facts_of(Path("a-00000001"), {"state": "failed", "attempts": [{"error": error}]}, {})
    assert state_of(facts, NOW).reason == "ConfigError: model._target_=a.B: odd sizes"


def test_a_trial_that_was_cancelled_has_left_its_worker(tmp_path: Path) -> None:
    place = {"script": "/s/workers/array-0/job.sh", "task": 0, "user": "me"}
    record = {"state": "interrupted", "attempts": [SAVED | {"verdict": "cancel"}]}
    jobs = Queue({(place["script"], 0): Job("7_0", "RUNNING", "None", "", "n1")})
    for script, has_left in ((place["script"], True), ("/s/array-0/job.sh", False)):
        known = convert(RunRecord, record | {"submission": place | {"script": script}}, "run.json")
        assert (job_of(tmp_path, known, jobs) is None) is has_left
