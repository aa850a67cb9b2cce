"""What follows from the end of the ranks: causes, what is known, and budgets, in tables."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.base.names.run_record import AttemptKey, AttemptRecord, RunRecord, Submission
from hpctrain.base.processes.causes import (
    CODE,
    CONFIG,
    DATA,
    FILE_SYSTEM,
    GPU_FAULT,
    GPU_MEMORY,
    HANG,
    HOST_MEMORY,
    IDLE,
    LOST_MOUNT,
    NODE,
    NON_FINITE,
    PORT,
    PREEMPTED,
    QUOTA,
    RANK_KILLED,
    TIME_LIMIT,
    TRACKING,
    USER_STOP,
)
from hpctrain.base.processes.child import Process
from hpctrain.cluster.ranks import epochs, flight_recorder
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.cluster.slurm.requeue import cause_of_step
from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.config.sections import RunSections
from hpctrain.engine.job import attempt as job_attempt
from hpctrain.engine.job import verdict as job_verdict
from hpctrain.engine.job.verdict import close_tracking
from hpctrain.errors import (
    DataError,
    DistributedError,
    HealthError,
    InUseError,
    JoinError,
    LateRankError,
    NoGpuError,
    PortTakenError,
)
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request
from hpctrain.runs.state import verdict as state_verdict
from hpctrain.runs.state.end import End
from hpctrain.runs.state.verdict import LEAVES, MOST, Room, after_srun, decide, fingerprint
from hpctrain.search import pieces
from hpctrain.tracking import final_status
from hpctrain.tracking.journal import Journal, journal_path, last_record
from tests.conftest import run_json

JOB, KILLED, TERMINATED = "7_1", 137, 143
Begin = Callable[..., RunDir]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """A function that begins an attempt of the job, with checkpoints of these steps."""

    def call(*steps: int, restarts: int = 0, **facts: Any) -> RunDir:
        run = RunDir(tmp_path)
        if not (tmp_path / "run.json").exists():
            run.update(state="queued", attempts=[])
        for step in steps:
            save(run, step)
        run.begin_attempt(
            job_id=JOB, restart_count=restarts, first_step=run.last_checkpoint(), **facts
        )
        return run

    return call


def save(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another rank or an observer tells is there already."""
    monkeypatch.setattr(failure, "_NAMED_S", 0.0)


def fail(run: RunDir, error: Exception, restarts: int = 0) -> None:
    """Let a rank of the run fail."""
    with pytest.raises(type(error)), failure.recorded(run.path, AttemptKey(JOB, restarts)):
        raise error


def last(run: RunDir) -> dict[str, Any]:
    attempt: dict[str, Any] = run_json(run.path)["attempts"][-1]
    return attempt


INSIDE, QUEUE = Room(inside=True, left_s=3600, warn_s=120), Room()
SPARE = INSIDE._replace(spares=1)
N2 = ("n2",)


def killed(count: int, **facts: Any) -> list[AttemptRecord]:
    """Return attempts of the job that were killed, and started again without a new checkpoint."""
    known = {"verdict": "restart", "cause": "rank killed", "job_id": JOB, "started": 1.0}
    return [AttemptRecord(**known | {"step_id": number} | facts) for number in range(count)]


@pytest.mark.parametrize(
    ("end", "room", "spent", "saved", "expected"),
    [
        # It is preempted, so it has no part in what it has not saved.
        (End(PREEMPTED, "SIGTERM"), INSIDE, 9, False, "requeue"),
        (End(TIME_LIMIT, "SIGUSR2"), INSIDE, 0, False, "requeue"),
        (End(TIME_LIMIT, "SIGUSR2"), INSIDE, 3, True, "requeue"),
        (End(TIME_LIMIT, "SIGUSR2"), INSIDE, 3, False, "failed"),
        (End(RANK_KILLED, "killed"), INSIDE, 0, False, "restart"),
        (End(RANK_KILLED, "killed"), INSIDE, 2, False, "restart"),
        (End(RANK_KILLED, "killed"), INSIDE, 3, False, "failed"),
        (End(RANK_KILLED, "killed"), INSIDE, 3, True, "restart"),
        (End(RANK_KILLED, "killed"), QUEUE, 2, False, "requeue"),
        (End(RANK_KILLED, "killed"), QUEUE, 3, False, "failed"),
        # Too little time for a start and for the warning before the limit.
        (End(RANK_KILLED, "killed"), INSIDE._replace(left_s=230), 0, False, "requeue"),
        (End(HANG, "late"), INSIDE, 1, False, "restart"),
        (End(HANG, "late", hosts=N2, bad=True), SPARE, 1, False, "restart --exclude=n2"),
        # The batch script requeues the job itself, without its bad nodes, if too few are good.
        (End(HANG, "late", hosts=N2, bad=True), INSIDE, 1, False, "restart --exclude=n2"),
        (End(HANG, "late", hosts=N2, bad=True), QUEUE, 1, False, "requeue"),
        (End(NODE, "silent", hosts=N2, bad=True), SPARE, 1, False, "restart --exclude=n2"),
        (End(NODE, "silent", hosts=N2, bad=True), SPARE, 3, False, "failed"),
        (End(GPU_FAULT, "ECC", hosts=N2), SPARE, 0, False, "restart --exclude=n2"),
        (End(GPU_FAULT, "ECC", hosts=N2), INSIDE, 0, False, "restart"),
        (End(LOST_MOUNT, "stale", hosts=N2, bad=True), SPARE, 0, False, "restart --exclude=n2"),
        (End(LOST_MOUNT, "stale", hosts=N2, bad=True), QUEUE, 0, False, "requeue"),
        (End(PORT, "taken"), INSIDE, 2, False, "restart"),
        (End(PORT, "taken"), QUEUE, 2, False, "requeue"),
        (End(PORT, "taken"), QUEUE, 3, False, "failed"),
        (End(GPU_MEMORY, "now 8 rows", smaller=True), INSIDE, 9, False, "restart"),
        (End(GPU_MEMORY, "one row", raised=True), INSIDE, 0, True, "failed"),
        (End(HOST_MEMORY, "killed"), INSIDE, 0, False, "restart"),
        (End(HOST_MEMORY, "MemoryError", raised=True), INSIDE, 0, True, "failed"),
        *(
            (End(cause, "x", raised=True), INSIDE, 0, True, "failed")
            for cause in (CODE, CONFIG, DATA, NON_FINITE, QUOTA, FILE_SYSTEM, TRACKING)
        ),
        (End(USER_STOP, "cancelled by me"), INSIDE, 0, True, "cancel"),
        (End(IDLE, "cancelled by the monitor"), INSIDE, 0, True, "cancel"),
        (End(USER_STOP, "SIGINT"), INSIDE, 0, True, "stopped"),
    ],
)
def test_what_follows_from_an_end(
    end: End, room: Room, spent: int, saved: bool, expected: str
) -> None:
    now = AttemptRecord(job_id=JOB, step_id=spent, started=2.0)
    record = RunRecord(attempts=(*killed(spent), now))
    found = decide(record, end, room, 20 if saved else 0)
    words = found.words(inside=room.inside)
    assert words == (expected if expected not in ("failed", "stopped") else "")
    assert (found.action == "failed") is (expected == "failed")
    assert (found.action == "stopped") is (expected == "stopped")
    assert found.facts["cause"] == end.cause.name
    # Nobody can lose it: it is in the record of the attempt.
    kept = found.record(20)
    assert (kept["verdict"], tuple(kept["avoid"])) == (found.action, found.avoid)
    assert kept["error" if expected == "failed" else "reason"].startswith(end.text)
    assert kept["state"] == ("failed" if expected == "failed" else "interrupted")


@pytest.mark.parametrize(
    ("before", "now", "left"),
    [
        (killed(2), {}, "restart 2 of 3 without a new checkpoint"),
        ([*killed(3), *killed(2, first_step=20)], {"first_step": 20}, "restart 2 of 3"),
        ([*killed(3)], {"first_step": 20}, ""),  # the last of them has saved
        (killed(3, cause="preempted"), {}, ""),
        (killed(3, verdict="", cause=""), {}, ""),  # a requeue by the administrator, a lost node
        ([*killed(1), *killed(2, cause="preempted")], {}, "restart 1 of 3"),
        (killed(3, job_id="6_0"), {}, ""),  # a person has resumed it since
        (killed(1, restart_count=1, verdict="requeue"), {}, "restart 1 of 3"),
    ],
)
def test_the_budget_is_over_both_kinds_of_restart(
    before: list[AttemptRecord], now: dict[str, Any], left: str
) -> None:
    attempts = (*before, AttemptRecord(**{"job_id": JOB, "started": 2.0} | now))
    record = RunRecord(attempts=attempts)
    assert state_verdict.restarts(record, now.get("first_step", 0)).startswith(left)
    assert bool(state_verdict.restarts(record, now.get("first_step", 0))) is bool(left)
    assert state_verdict.restarts(record, 40) == ""


def test_the_links_of_a_chain_have_one_budget() -> None:
    links = tuple(
        AttemptRecord(**{**_fields(one), "job_id": str(n)}) for n, one in enumerate(killed(3))
    )
    attempts = (*links, AttemptRecord(job_id="9", started=2.0))
    assert state_verdict.restarts(RunRecord(attempts=attempts), 0) == ""
    chain = RunRecord(attempts=attempts, submission=Submission(time=0.5))
    assert state_verdict.restarts(chain, 0).startswith("restart 3 of 3")


def _fields(one: AttemptRecord) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_the_same_end_at_the_same_step_is_not_tried_a_third_time() -> None:
    def end(text: str, step: int, frame: str = "net.py:3 in forward") -> End:
        return End(GPU_FAULT, text, frame, step)

    first = end("GPU fault on n1: rank 3, pid 711: unknown error at 0x7f3a", 37)
    again = end("GPU fault on gpu-n12: rank 0, pid 8: unknown error at 0x11", 37)
    hosts = {"hosts": ("n1", "gpu-n12"), "started": 1.0, "job_id": JOB}
    known = decide(RunRecord(attempts=(AttemptRecord(**hosts),)), first, INSIDE, 30)
    assert known.action == "restart"
    facts = {name: known.facts[name] for name in ("cause", "fingerprint", "ended_at", "verdict")}
    before = AttemptRecord(**hosts | facts)
    assert "n1" not in before.fingerprint
    record = RunRecord(attempts=(before, AttemptRecord(**hosts | {"first_step": 30})))
    found = decide(record, again, INSIDE, 35)
    assert found.action == "failed"
    assert "for the second time at step 37: it would come again" in found.reason
    others = (
        again._replace(step=38),
        again._replace(text="CUDA error: unspecified launch failure"),
    )
    for other in (*others, again._replace(frame="net.py:9 in backward")):
        assert decide(record, other, INSIDE, 35).action == "restart"
    # Without a step of its own, an attempt says nothing about a step.
    early = RunRecord(attempts=(before, AttemptRecord(**hosts | {"first_step": 37})))
    assert decide(early, again, INSIDE, 37).action == "restart"
    # Time limits come at other steps.
    late = End(TIME_LIMIT, "SIGUSR2", step=40)
    facts = {"fingerprint": fingerprint(late), "ended_at": 39, "verdict": "requeue"}
    record = RunRecord(attempts=(AttemptRecord(**hosts | facts), AttemptRecord(**hosts)))
    assert decide(record, late, INSIDE, 0).action == "failed"
    assert decide(record, late, INSIDE, 39).action == "requeue"


def test_the_room_is_read_from_the_job() -> None:
    """A node that is avoided is no spare one."""
    env = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_END_TIME": "7"}
    attempts = AttemptRecord(job_id=JOB, nodes=2, avoid=("n3",)), AttemptRecord(job_id=JOB, nodes=2)
    room = Room.of(RunRecord(attempts=attempts), inside=True, warn_s=9, env=env)
    assert room._replace(left_s=0) == Room(inside=True, left_s=0, spares=1, warn_s=9)
    assert room.left_s < 0
    assert Room.of(RunRecord(attempts=attempts), inside=False, warn_s=0, env={}) == Room()


SAID = "rank 1 (n2) is late in step 9"
HUNG = {"sentence": SAID, "rank": 1, "host": "n2", "time": 1.0}
LATE = LateRankError("after step 9: rank 1 (n1) did not arrive at all_reduce number 29")
STUCK = "rank 1 (n2): asked to stop by {} 110 s ago, it is still at mine.py:7 in f"
IN_LIMIT, IN_GRACE = (LateRankError(STUCK.format(name)) for name in ("SIGUSR2", "SIGTERM"))
ECC = "CUDA error: uncorrectable ECC error encountered"
HOST = socket.gethostname()
ON_GPU = f"GPU fault on {HOST}: RuntimeError: {ECC}"
ADVICE = RuntimeError(f"{ECC}\nCUDA kernel errors might be")
STALE = f"lost mount on {HOST}: OSError: [Errno 116] Stale"
ALONE = JoinError("no process group (gloo/transport/tcp/socket.cc:142 … unreachable)")
QUOTA_TEXT = "OSError: [Errno 122] Disk quota exceeded"
NAN = HealthError("loss is not finite since step 50")
LESS = "out of memory: now 8 rows"
ROWS = {"micro_batch_rows": 8, "lowered_in": [JOB, 0, 0]}


@pytest.mark.parametrize(
    ("error", "hung", "code", "word", "cause", "text"),
    [
        (None, "", KILLED, "restart", "rank killed", "a rank was killed (exit code 137)"),
        (None, "", 1, "", "", ""),  # the ranks tell it
        (LATE, "", TERMINATED, "restart", "hang", str(LATE)),
        # It could not stop in time: another step in this allocation would be killed.
        (IN_LIMIT, "", TERMINATED, "requeue", "time limit", str(IN_LIMIT)),
        (IN_GRACE, "", TERMINATED, "requeue", "preempted", str(IN_GRACE)),
        # An observer has seen the late rank, and what the others tell follows from it.
        (LATE, "C code", KILLED, "restart", "hang", SAID),
        (None, "dead", KILLED, "restart", "rank killed", SAID),
        (None, "uninterruptible", 1, "restart --exclude=n2", "hang", SAID),
        (None, "silent", KILLED, "restart --exclude=n2", "node", SAID),
        (ZeroDivisionError("x"), "dead", 1, "", "code", "ZeroDivisionError: x"),
        # Slurm has killed rank 0 then; and a rank that was killed before is the cause.
        (ALONE, "", KILLED, "", "code", f"JoinError: {ALONE}"),
        (ALONE, "dead", KILLED, "restart", "rank killed", SAID),
        (RuntimeError(ECC), "", 1, "restart", "GPU fault", ON_GPU),
        (ADVICE, "dead", 1, "restart", "GPU fault", ON_GPU),
        (MemoryError("x"), "", 1, "restart", "memory of the GPU", LESS),
        (MemoryError("x"), "", 1, "", "memory of the host", "MemoryError: x"),
        (NAN, "", 8, "", "non-finite", str(NAN)),
        (DataError("a.h5 is gone"), "", 3, "", "data", "DataError: a.h5 is gone"),
        # The file system may be there on another node.
        (OSError(116, "Stale"), "", 1, f"restart --exclude={HOST}", "lost mount", STALE),
        (OSError(122, "Disk quota exceeded"), "", 1, "", "quota", QUOTA_TEXT),
    ],
)
def test_an_end_is_judged_by_what_is_known_of_it(
    error: Exception | None, hung: str, code: int, word: str, cause: str, text: str, begin: Begin
) -> None:
    run, key = begin(20), AttemptKey(JOB, 0)
    if error is not None:
        fail(run, error)
    if hung:
        fact = {**HUNG, "state": hung, **key._asdict()}
        (run.path / "hang.json").write_text(json.dumps(fact))
    if text == LESS:
        run.update(**ROWS)
    assert after_srun(run, code, key, inside=True) == word
    told = last(run)
    assert (told.get("cause", ""), told.get("reason") or told.get("error", "")) == (cause, text)
    # Asked again, as after the death of the batch script: the same, and nothing is spent twice.
    assert after_srun(run, code, key, inside=True) == word
    assert last(run) == told
    # A script of an older version knows no `restart`.
    assert after_srun(run, code, key) == ("requeue" if word else "")


def test_a_script_that_tells_no_step_means_the_last_one(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(launch=SimpleNamespace(warn_s=120))
    monkeypatch.setattr(job_verdict, "load", lambda path: config)
    for name, value in {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = begin(20, step_id=3)
    monkeypatch.setattr(RunDir, "open", lambda path: run)
    assert job_verdict.main([str(run.path), str(KILLED)]) == 0
    assert capsys.readouterr().out == "requeue\n"
    (only,) = run_json(run.path)["attempts"]
    assert (only["step_id"], only["verdict"]) == (3, "requeue")


@pytest.mark.parametrize("damaged", [False, True])
def test_restarts_have_a_budget_and_then_the_run_has_failed(begin: Begin, damaged: bool) -> None:
    steps = (20, 40) if damaged else ()
    for number in range(MOST + 1):
        run = begin(*steps if number == 0 else (), step_id=number)
        if damaged:
            assert last(run)["first_step"] == (20 if number else 40)
            run.add_facts(first_step=20, damaged=[40])  # so that of step 40 is no new one
        found = after_srun(run, KILLED, AttemptKey(JOB, 0, number), inside=number % 2 == 0)
        assert found == ("" if number == MOST else ["restart", "requeue"][number % 2])
    said = "a rank was killed (exit code 137), and no checkpoint was saved since the last restart"
    assert last(run)["error"] == (
        f"{said} (3 in a row): not requeued. If the host had no memory left, raise launch.mem_gb; "
        "`resume` starts the run again"
    )
    # Before the ranks begin, too: an attempt of the verdict's own stands for them.
    assert len(run_json(run.path)["attempts"]) == MOST + 1
    assert after_srun(run, KILLED, AttemptKey("8", 0, 0)) == "requeue"
    assert len(run_json(run.path)["attempts"]) == MOST + 2
    if damaged:  # until it is saved again, or brought back
        assert run.last_checkpoint() == last(run)["first_step"] == 20
        newest = run.checkpoints / "step-00000040"
        Manifest(40, 1, {}, {}, last(run)["started"], {}).write(newest)
        assert run.last_checkpoint() == 40
        Manifest(40, 1, {}, {}, 1.0, {}).write(newest)
        assert run.last_checkpoint() == 20
        run.add_facts(first_step=40, damaged=[])
        assert run.last_checkpoint() == 40


@pytest.mark.parametrize(
    ("left_s", "state", "cause"),
    [
        (-5.0, "", "time limit"),  # Slurm kills the ranks then: no crash
        (900.0, "OUT_OF_MEMORY", "memory of the host"),
        (900.0, "FAILED", "rank killed"),
        (900.0, "", "rank killed"),
    ],
)
def test_what_slurm_says_of_a_killed_rank(
    left_s: float,
    state: str,
    cause: str,
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in answers for sacct: the cluster of the tests does not limit memory."""
    sacct = tmp_path / "sacct"
    sacct.write_text(
        f'#!/bin/sh\n[ "$4" = --jobs=9.0 ] || exit 1\necho "{state}"\n'.replace("$4", "$3")
    )
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left_s)))
    run = begin()
    expected = "requeue" if cause == "time limit" else "restart"
    assert after_srun(run, KILLED, AttemptKey(JOB, 0), inside=True) == expected
    assert last(run)["cause"] == cause


def test_the_memory_of_a_host_is_told_by_the_group_of_the_job(tmp_path: Path) -> None:
    """The files are those of the kernel's two versions; there is no such group here."""
    env, job = {"SLURM_JOB_ID": "9", "PATH": ""}, tmp_path / "job_9"
    job.mkdir()
    for name, text, cause in (
        ("memory.events", "max 4\noom 1\noom_kill 1\noom_group_kill 0\n", HOST_MEMORY),
        ("memory.events", "oom 0\noom_kill 0\n", None),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", HOST_MEMORY),
    ):
        (job / name).write_text(text)
        assert cause_of_step(0, {}, [tmp_path, job]) is None
        assert cause_of_step(0, env, [tmp_path, job]) is cause


@pytest.mark.parametrize(
    ("hosts", "faulty", "bad"), [(N2, False, []), (N2, True, ["n2"]), (("n2", "n3"), False, ["n2"])]
)
def test_the_node_of_a_gpu_that_is_lost_is_excluded(
    hosts: tuple[str, ...],
    faulty: bool,
    bad: list[str],
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks end before their preflight. A stand-in answers for Slurm.

    A job of one node knows it only from a fault before; of several, the others show all GPUs.
    """
    asked: list[Any] = []
    monkeypatch.setattr(
        state_verdict, "requeue_from_rank", lambda job, exclude: asked.append((job, exclude))
    )
    run = begin()
    reason = f"GPU fault on n2: {ECC}" if faulty else "SIGTERM"
    run.end_attempt("interrupted", reason=reason)
    begin(restarts=1)
    config = Config()
    config.output_dir = str(run.path / "all")
    ranks = RankInfo("slurm", hosts=hosts, job_id=JOB, restart_count=1)
    error = NoGpuError("the job has GPUs, but torch sees no GPU here, on n2")
    error.hosts = ["n2"]
    what = RunSections.of(config)
    job_attempt.Attempt(what, run, ranks)._record_failure(error)
    assert run_json(run.path)["state"] == ("interrupted" if bad else "failed")
    assert asked == [(JOB, "n2")] * bool(bad)
    assert [*excluded_hosts.read(config.output_dir)] == bad
    assert after_srun(run, 2, AttemptKey(JOB, 1)) == ("requeue" if bad else "")


@pytest.mark.parametrize(
    ("own", "loop", "word", "asked"),
    [
        (False, False, "requeue", [JOB]),  # rank 0 does it, and the batch script if that fails
        (False, True, "restart", []),
        (True, True, "", []),  # MASTER_PORT names it, and a restart would find the same
    ],
)
def test_another_port_is_taken_by_a_restart(
    own: bool,
    loop: bool,
    word: str,
    asked: list[str],
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(state_verdict, "requeue_from_rank", lambda job, exclude: done.append(job))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if own:
        monkeypatch.setenv("MASTER_PORT", "29500")
    run, ranks = begin(), RankInfo("slurm", hosts=("n1",), job_id=JOB)
    if loop:
        (run.path / "epochs").write_text(f"{JOB} 0 0\n")
    error = PortTakenError("port 12028 on n1 is taken (Address already in use)")
    fail(run, error)
    what = RunSections.of(Config())
    job_attempt.Attempt(what, run, ranks)._record_failure(error)
    assert done == asked
    assert after_srun(run, 5, AttemptKey(JOB, 0), inside=loop) == word
    assert (last(run)["cause"], last(run)["verdict"]) == ("port", word or "failed")


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("finished", "", ["", ""]),
        ("interrupted", "SIGTERM", ["requeue", "requeue"]),
        ("interrupted", "SIGUSR2", ["requeue", ""]),  # the second time without a step
        ("interrupted", "SIGINT", ["", ""]),
    ],
)
def test_a_saved_job_that_rank_0_could_not_requeue(
    state: str, reason: str, words: list[str], begin: Begin
) -> None:
    for restarts, word in enumerate(words):
        run = begin(restarts=restarts, hosts=["n1"])
        run.end_attempt(state, reason=reason, step=run.last_checkpoint())
        assert after_srun(run, TERMINATED, AttemptKey(JOB, restarts)) == word


def test_a_job_that_was_cancelled_is_not_started_again(begin: Begin) -> None:
    run = begin(20)
    stop_request.write(run.path, "me")
    for restarts in (0, 1):
        begin(restarts=restarts)
        run.end_attempt("interrupted", reason="cancel", step=20)
        assert after_srun(run, TERMINATED, AttemptKey(JOB, restarts)) == "cancel"
    begin(restarts=2)  # the rank was killed before it could save
    assert after_srun(run, KILLED, AttemptKey(JOB, 2)) == "cancel"
    assert (last(run)["cause"], last(run)["reason"]) == ("user stop", "cancelled by me")
    # After the decision.
    begin(restarts=3, verdict="restart")
    assert after_srun(run, KILLED, AttemptKey(JOB, 3), inside=True) == "cancel"
    stop_request.write(run.path, f"{stop_request.IDLE} (GPUs idle)")
    begin(restarts=4)
    assert after_srun(run, KILLED, AttemptKey(JOB, 4)) == "cancel"
    assert last(run)["cause"] == "idle"
    # The request is older than the last submission.
    run.update(submission={"time": 4e9})
    begin(restarts=0)
    assert after_srun(run, KILLED, AttemptKey(JOB, 0)) == "requeue"


# What NCCL's watchdog prints and writes; there is no GPU here, so the test does it.
WATCHDOG = (
    "[rank1]:[E1124 02:00:00.1 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=29, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600081 milliseconds before timing out.\n"
)


def test_a_timeout_of_nccl_is_told_and_is_no_rank_that_was_killed(begin: Begin) -> None:
    run = begin()
    environment: dict[str, str] = {}
    flight_recorder.prepare(run.logs, 1, environment)
    (run.logs / f"{JOB}.rank1.log").write_text(f"step 1\n{WATCHDOG}terminate called\n")
    Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + "1").write_bytes(b"a pickle of torch")
    assert after_srun(run, 134, AttemptKey(JOB, 0)) == "requeue"
    said = "ALLREDUCE number 29 has timed out on rank 1 after parallel.timeout_s"
    assert last(run)["reason"] == f"{said} (torch's flight recorder: {run.logs}/flight_recorder_*)"
    begin(restarts=1)
    assert after_srun(run, 137, AttemptKey(JOB, 1)) == "requeue"  # Slurm has killed those left
    assert (last(run)["cause"], said in last(run)["reason"]) == ("hang", True)
    # The line in the log is of an earlier attempt.
    begin(restarts=0)
    flight_recorder.prepare(run.logs, 0, environment)
    assert after_srun(run, KILLED, AttemptKey(JOB, 0)) == "requeue"
    assert last(run)["reason"] == "a rank was killed (exit code 137)"


def test_a_rank_that_fails_by_itself_is_not_requeued(begin: Begin) -> None:
    run = begin()
    with (
        pytest.raises(ZeroDivisionError),
        failure.recorded(run.path, AttemptKey(JOB, 0)),
        failure.recorded(run.path, AttemptKey(JOB, 0)),
    ):
        raise ZeroDivisionError("of mine")
    # Meanwhile another rank sees that this one is gone.
    fail(run, ValueError("Connection closed by peer"))
    assert (
        getattr(failure.first(run.path, AttemptKey(JOB, 0)), "error", "")
        == "ZeroDivisionError: of mine"
    )
    assert after_srun(run, TERMINATED, AttemptKey(JOB, 0)) == ""
    assert (run_json(run.path)["state"], len(run_json(run.path)["attempts"])) == ("failed", 1)
    assert last(run)["error"] == "ZeroDivisionError: of mine"
    told = {
        "RuntimeError: Connection closed by peer [10.77.1.12]:4711": "ZeroDivisionError: of mine",
        "ValueError: of rank 0": "ValueError: of rank 0",
    }
    for restarts, (error, expected) in enumerate(told.items(), 1):
        begin(restarts=restarts)
        fail(run, ZeroDivisionError("of mine"), restarts)
        run.end_attempt("failed", error=error)
        ended = last(run)["ended"]
        assert after_srun(run, 1, AttemptKey(JOB, restarts)) == ""
        assert (last(run)["error"], last(run)["ended"]) == (expected, ended)
    # The record of an older start of the job says nothing about this one.
    begin(restarts=3)
    save(run, 20)
    assert after_srun(run, KILLED, AttemptKey(JOB, 3)) == "requeue"


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (SystemExit(3), True),
        (KeyboardInterrupt(), True),
        (DistributedError("the first batch: rank 3 is gone (Broken pipe)"), False),
        (DistributedError("the first batch: rank 3 failed: ZeroDivisionError: x"), False),
        (DistributedError("the check (Connection was likely closed. Did it crash?)"), False),
        (JoinError("no process group (gloo/transport/tcp/socket.cc:142 … unreachable)"), True),
        (DistributedError("port 4711 on node1 is taken"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:144] Timed out waiting 1000ms"), True),
        (RuntimeError("ncclSystemError: …\nLast error:\nCall to bind failed : in use"), True),
    ],
)
def test_an_error_that_follows_from_another_rank_is_no_cause(
    error: BaseException, recorded: bool, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), failure.recorded(tmp_path, AttemptKey(JOB, 0)):
        raise error
    assert (failure.first(tmp_path, AttemptKey(JOB, 0)) is not None) is recorded
    with pytest.raises(type(error)), failure.recorded(tmp_path / "none", AttemptKey("", 0)):
        raise error


def test_an_error_before_the_attempt_is_recorded_as_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.update(state="queued", attempts=[])
    fail(run, ValueError("mine"))
    assert after_srun(run, 2, AttemptKey(JOB, 0)) == ""
    assert (last(run)["state"], last(run)["error"]) == ("failed", "ValueError: mine")
    # `logs` finds the message, which the rank has printed since then.
    assert last(run)["started"] == (tmp_path / "failed").stat().st_mtime


def test_the_end_of_a_run_whose_rank_0_was_killed_is_recorded_for_mlflow(begin: Begin) -> None:
    def dies(run: RunDir) -> None:
        journal = Journal(run.path)
        journal.append("status", status="RUNNING", **Process("elsewhere", 7, 1)._asdict())
        journal.append("metrics", step=3, metrics={})
        journal.close()
        assert final_status.is_open(run.path)
        assert not final_status.has_died_here(run.path)

    def recorded(run: RunDir) -> tuple[Any, ...]:
        found = last_record(journal_path(run.path), "status") or {}
        return tuple(found[key] for key in ("attempt", "status", "reason"))

    config = Config()
    config.data.path, config.tracking.upload = "/data", False
    run = begin()
    run.freeze(dump(config))
    close_tracking(run, KILLED)  # a run without a journal
    dies(run)
    run.end_attempt("interrupted", reason="a rank was killed", step=3)
    close_tracking(run, KILLED)
    assert recorded(run) == (1, "KILLED", "a rank was killed")
    size = journal_path(run.path).stat().st_size
    close_tracking(run, KILLED)
    assert journal_path(run.path).stat().st_size == size
    for restarts in range(1, MOST + 2):
        begin(restarts=restarts)
        word = after_srun(run, KILLED, AttemptKey(JOB, restarts))
    dies(run)
    assert word == ""
    close_tracking(run, KILLED)
    assert recorded(run)[:2] == (2, "FAILED")
    assert "no checkpoint was saved since the last restart" in recorded(run)[2]
    begin(restarts=9)
    dies(run)
    close_tracking(run, 3)
    assert recorded(run) == (3, "KILLED", "the ranks ended with exit code 3")


def test_the_record_of_another_process_that_trains_the_run_is_left_alone(begin: Begin) -> None:
    run = begin(20, host="login")
    with run.lock():
        before = run_json(run.path)
        with (
            pytest.raises(InUseError),
            failure.recorded(run.path, AttemptKey("9_0", 1)),
            RunDir(run.path).lock(),
        ):
            raise AssertionError("the lock was free")
        for code in (InUseError.exit_code, KILLED):  # killed before it has seen the lock
            assert after_srun(RunDir(run.path), code, AttemptKey("9_0", 1)) == LEAVES
            (run.path / "failed").unlink(missing_ok=True)
        assert not job_verdict.is_over(LEAVES)  # whose end would be recorded in MLflow
        assert run_json(run.path) == before


def test_the_end_of_a_worker_is_judged_by_its_trial(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, step = tmp_path / "worker", AttemptKey(JOB, 0, 2)
    worker.mkdir()
    config = Config()
    config.launch.warn_s = 60
    for module in (job_verdict, pieces):
        monkeypatch.setattr(module, "load", lambda _: config)
    monkeypatch.setattr(RunDir, "open", lambda path: RunDir(path))

    def word_of(code: int) -> tuple[RunDir | None, str]:
        return pieces.of_worker(worker, code, step)

    # Between two trials: what killed it is not the fault of one.
    assert [word_of(code)[1] for code in (KILLED, 1, 130)] == ["restart", "", ""]
    run = begin(5, step_id=2)
    pieces.add(worker, step, run=str(tmp_path), until=9)
    epochs.begin(tmp_path, step)
    run.end_attempt("paused", result={"step": 9}, step=9)
    assert word_of(KILLED) == (None, "restart")
    assert last(run)["state"] == "paused"
    # A second piece of the trial in the same step, out of memory in the first: the key is the same.
    run.update(lowered_in=list(step))
    begin(step_id=2)
    pieces.add(worker, step, run=str(tmp_path), until=12)
    assert word_of(KILLED) == (None, "restart")
    assert (last(run)["verdict"], last(run)["cause"]) == ("restart", "rank killed")
    begin(step_id=2)
    with pytest.raises(ZeroDivisionError), failure.recorded(tmp_path, step):
        raise ZeroDivisionError
    over, word = word_of(1)
    assert over is not None
    assert (word, last(run)["verdict"]) == ("restart", "failed")
    # Another worker has it by now.
    begin(step_id=2)
    epochs.begin(tmp_path, AttemptKey("8_0"))
    assert word_of(KILLED) == (None, "restart")
    assert "ended" not in last(run)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert word_of(KILLED) == (None, "requeue")
    # Steps that end before they begin a piece are not started again for ever.
    assert pieces.of_worker(worker, KILLED, step._replace(step_id=5)) == (None, "requeue")
    assert pieces.of_worker(worker, KILLED, step._replace(step_id=6)) == (None, "")
