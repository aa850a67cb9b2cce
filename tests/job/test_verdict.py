"""What the batch script does with a job whose ranks have ended with an error."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import Config
from hpctrain.errors import (
    DistributedError,
    HealthError,
    InUseError,
    LateRankError,
    NoGpuError,
)
from hpctrain.job import preflight
from hpctrain.job.attempt import Attempt
from hpctrain.job.verdict import close_tracking, verdict
from hpctrain.rendezvous import flight_recorder
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import AttemptKey
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request
from hpctrain.slurm import excluded_hosts
from hpctrain.tracking import final_status
from hpctrain.tracking.journal import Journal, journal_path, last_record
from hpctrain.tracking.uploader_process import Process
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


def fail(run: RunDir, error: Exception, restarts: int = 0) -> None:
    """Let a rank of the run fail."""
    with pytest.raises(type(error)), failure.recorded(run.path, AttemptKey(JOB, restarts)):
        raise error


def last(run: RunDir) -> dict[str, Any]:
    attempt: dict[str, Any] = run_json(run.path)["attempts"][-1]
    return attempt


def test_a_run_that_is_not_healthy_is_not_requeued(begin: Begin) -> None:
    run = begin(20)
    text = "loss is not finite since step 50 (first on rank 1, node2)"
    fail(run, HealthError(text))
    assert verdict(run, HealthError.exit_code, AttemptKey(JOB, 0)) == ""
    assert (run_json(run.path)["state"], last(run)["error"]) == ("failed", text)


def test_killed_ranks_come_back_as_long_as_they_make_progress(begin: Begin) -> None:
    run = begin()
    assert verdict(run, KILLED, AttemptKey(JOB, 0)) == "requeue"
    assert run_json(run.path)["state"] == "interrupted"
    assert last(run)["reason"] == "a rank was killed (exit code 137)"
    run = begin(restarts=1)
    save(run, 20)
    # Slurm has ended the other ranks with SIGTERM, and rank 0 has only seen a broken connection.
    run.end_attempt("failed", error="RuntimeError: Connection closed by peer [10.77.1.12]:4711")
    assert verdict(run, TERMINATED, AttemptKey(JOB, 1)) == "requeue"
    assert last(run)["step"] == 20
    run = begin(restarts=2)
    assert verdict(run, KILLED, AttemptKey(JOB, 2)) == ""
    assert run_json(run.path)["state"] == "failed"
    assert "no checkpoint was saved since the last restart" in last(run)["error"]


def test_a_job_in_which_a_rank_hangs_comes_back_as_long_as_it_makes_progress(
    begin: Begin,
) -> None:
    said = "after step 9: rank 1 (n1) did not arrive at all_reduce number 29"
    run = begin()
    fail(run, LateRankError(said))
    run.end_attempt("failed", error=f"LateRankError: {said}")  # by rank 0
    # Slurm has ended the rank that hung.
    assert verdict(run, TERMINATED, AttemptKey(JOB, 0)) == "requeue"
    assert (run_json(run.path)["state"], last(run)["reason"]) == ("interrupted", said)
    begin(restarts=1)  # rank 0 hangs, and is ended before it can write
    fail(run, LateRankError(said), 1)
    save(run, 20)
    assert verdict(run, KILLED, AttemptKey(JOB, 1)) == "requeue"
    begin(restarts=2)
    fail(run, LateRankError(said), 2)
    assert verdict(run, TERMINATED, AttemptKey(JOB, 2)) == ""
    assert run_json(run.path)["state"] == "failed"
    assert last(run)["error"].startswith(f"{said}, and no checkpoint was saved since")
    assert "mem_gb" not in last(run)["error"]


def test_a_job_whose_gpu_has_a_fault_comes_back_once(begin: Begin) -> None:
    run = begin()
    ecc = "CUDA error: uncorrectable ECC error encountered"
    fail(run, RuntimeError(f"{ecc}\nCUDA kernel errors might be asynchronously reported"))
    run.end_attempt("failed", error=f"RuntimeError: {ecc}")  # by rank 0
    assert verdict(run, 1, AttemptKey(JOB, 0)) == "requeue"
    said = f"GPU fault on {socket.gethostname()}: RuntimeError: {ecc}"
    assert (run_json(run.path)["state"], last(run)["reason"]) == ("interrupted", said)
    begin(restarts=1)  # it may also be the program: without progress, the second time is final
    fail(run, RuntimeError(ecc), 1)
    assert verdict(run, TERMINATED, AttemptKey(JOB, 1)) == ""
    assert last(run)["error"].startswith(f"{said}, and no checkpoint was saved since")


@pytest.mark.parametrize("faulty", [True, False])
def test_the_node_of_a_gpu_that_is_still_lost_is_excluded(
    faulty: bool, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the next attempt end before their preflight. A stand-in answers for Slurm."""
    asked: list[Any] = []

    def requeue(job_id: str, exclude: str) -> bool:
        asked.append((job_id, exclude))
        return True

    monkeypatch.setattr(preflight, "requeue_from_rank", requeue)
    host, run = socket.gethostname(), begin()
    text = "CUDA error: unknown error" if faulty else "Timed out"
    fail(run, RuntimeError(text) if faulty else LateRankError(text))
    assert verdict(run, 1, AttemptKey(JOB, 0)) == "requeue"
    begin(restarts=1)
    config = Config()
    config.output_dir = str(run.path / "all")
    ranks = RankInfo("slurm", hosts=(host,), job_id=JOB, restart_count=1)
    error = NoGpuError(f"the job has GPUs, but torch sees no GPU here, on {host}")
    error.hosts = [host]
    Attempt(config, run, ranks)._record_failure(error)
    assert (run_json(run.path)["state"] == "interrupted") is error.requeued is faulty
    assert asked == ([(JOB, host)] if faulty else [])
    assert [*excluded_hosts.read(config.output_dir)] == ([host] if faulty else [])


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
    assert verdict(run, 134, AttemptKey(JOB, 0)) == "requeue"
    said = "ALLREDUCE number 29 has timed out on rank 1 after parallel.timeout_s"
    assert last(run)["reason"] == f"{said} (torch's flight recorder: {run.logs}/flight_recorder_*)"
    begin(restarts=1)
    assert verdict(run, 137, AttemptKey(JOB, 1)) == ""  # Slurm has killed the ranks that were left
    assert said in last(run)["error"]
    assert "mem_gb" not in last(run)["error"]
    # The line in the log is of an earlier attempt.
    begin(restarts=0)
    flight_recorder.prepare(run.logs, 0, environment)
    assert verdict(run, KILLED, AttemptKey(JOB, 0)) == "requeue"
    assert last(run)["reason"] == "a rank was killed (exit code 137)"


def test_ranks_that_are_killed_before_they_begin_are_not_restarted_for_ever(begin: Begin) -> None:
    run = begin()
    save(run, 20)
    assert verdict(run, KILLED, AttemptKey(JOB, 0)) == "requeue"
    assert verdict(run, KILLED, AttemptKey(JOB, 1)) == ""
    assert [each["state"] for each in run_json(run.path)["attempts"]] == ["interrupted", "failed"]


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
    assert failure.read(run.path, AttemptKey(JOB, 0)) == "ZeroDivisionError: of mine"
    assert verdict(run, TERMINATED, AttemptKey(JOB, 0)) == ""
    assert (run_json(run.path)["state"], len(run_json(run.path)["attempts"])) == ("failed", 1)
    assert last(run)["error"] == "ZeroDivisionError: of mine"
    run.end_attempt("failed", error="RuntimeError: Connection closed by peer [10.77.1.12]:4711")
    assert verdict(run, 1, AttemptKey(JOB, 0)) == ""
    assert last(run)["error"] == "ZeroDivisionError: of mine"
    run.end_attempt("failed", error="ValueError: of rank 0")
    assert verdict(run, 1, AttemptKey(JOB, 0)) == ""
    assert last(run)["error"] == "ValueError: of rank 0"
    # The record of an older start of the job says nothing about this one.
    begin(restarts=1)
    save(run, 20)
    assert verdict(run, KILLED, AttemptKey(JOB, 1)) == "requeue"


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (SystemExit(3), True),
        (KeyboardInterrupt(), True),
        (DistributedError("the first batch: rank 3 is gone (Broken pipe)"), False),
        (DistributedError("the first batch: rank 3 failed: ZeroDivisionError: x"), False),
        (DistributedError("no process group (Connection was likely closed. Did it crash?)"), False),
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
    assert (failure.read(tmp_path, AttemptKey(JOB, 0)) is not None) is recorded
    with pytest.raises(type(error)), failure.recorded(tmp_path / "none", AttemptKey("", 0)):
        raise error


def test_an_error_before_the_attempt_is_recorded_as_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.update(state="queued", attempts=[])
    fail(run, ValueError("mine"))
    assert verdict(run, 2, AttemptKey(JOB, 0)) == ""
    assert (last(run)["state"], last(run)["error"]) == ("failed", "ValueError: mine")
    # `logs` finds the message, which the rank has printed since then.
    assert last(run)["started"] == (tmp_path / "failed").stat().st_mtime


def test_a_job_that_is_out_of_memory_comes_back_with_smaller_micro_batches(begin: Begin) -> None:
    run = begin(20)
    fail(run, MemoryError("CUDA out of memory"))
    run.update(micro_batch_rows=8, lowered_in=[JOB, 0, 0])
    assert verdict(run, 1, AttemptKey(JOB, 0)) == "requeue"
    state, reason = "interrupted", "out of memory: now 8 rows"
    assert (last(run)["state"], last(run)["reason"]) == (state, reason)
    # There is no smaller one.
    begin(restarts=1)
    fail(run, MemoryError("CUDA out of memory"), 1)
    assert verdict(run, 1, AttemptKey(JOB, 1)) == ""


@pytest.mark.parametrize("code", [1, 2, 5, 127])
def test_an_exit_code_of_a_rank_is_no_kill(code: int, begin: Begin) -> None:
    assert verdict(begin(), code, AttemptKey(JOB, 0)) == ""


def test_a_job_that_was_cancelled_or_has_finished_is_not_requeued(begin: Begin) -> None:
    run = begin(20)
    run.end_attempt("finished", result={})
    assert verdict(run, 134, AttemptKey(JOB, 0)) == ""
    stop_request.write(run.path, "me")
    for restarts in (0, 1):
        begin(restarts=restarts)
        run.end_attempt("interrupted", reason="cancel", step=20)
        assert verdict(run, TERMINATED, AttemptKey(JOB, restarts)) == "cancel"
    begin(restarts=2)  # the rank was killed before it could save
    assert verdict(run, KILLED, AttemptKey(JOB, 2)) == "cancel"
    # The request is older than the last submission.
    run.update(submission={"time": 4e9})
    begin(restarts=0)
    assert verdict(run, KILLED, AttemptKey(JOB, 0)) == "requeue"


def test_a_saved_job_that_rank_0_could_not_requeue_is_requeued(begin: Begin) -> None:
    run = begin()
    save(run, 5)
    run.end_attempt("interrupted", reason="SIGTERM", step=5)
    assert verdict(run, TERMINATED, AttemptKey(JOB, 0)) == "requeue"
    begin(restarts=1)
    run.end_attempt("interrupted", reason="SIGTERM", step=5)
    assert verdict(run, TERMINATED, AttemptKey(JOB, 1)) == ""
    begin(restarts=0)
    run.end_attempt("interrupted", reason="SIGINT", step=5)
    assert verdict(run, 130, AttemptKey(JOB, 0)) == ""


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
    run.freeze(config)
    close_tracking(run, KILLED)  # a run without a journal
    dies(run)
    run.end_attempt("interrupted", reason="a rank was killed", step=3)
    close_tracking(run, KILLED)
    assert recorded(run) == (1, "KILLED", "a rank was killed")
    size = journal_path(run.path).stat().st_size
    close_tracking(run, KILLED)
    assert journal_path(run.path).stat().st_size == size
    begin(restarts=1)
    dies(run)
    assert verdict(run, KILLED, AttemptKey(JOB, 1)) == ""
    close_tracking(run, KILLED)
    assert recorded(run)[:2] == (2, "FAILED")
    assert "no checkpoint was saved since the last restart" in recorded(run)[2]
    begin(restarts=2)
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
        assert verdict(RunDir(run.path), InUseError.exit_code, AttemptKey("9_0", 1)) == ""
        assert run_json(run.path) == before
