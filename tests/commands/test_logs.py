"""`hpctrain logs`: why a run has failed, and the end of its output."""

import logging
import os
from pathlib import Path

import pytest

from hpctrain.base.names.run_record import Hang
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.commands.facts import Facts
from hpctrain.commands.logs import rank_logs, telling
from hpctrain.errors import ConfigError
from hpctrain.runs.state.failure import Failure
from hpctrain.runs.terminal_log import kept
from tests.conftest import run_module
from tests.made_runs import NOW, SUBMITTED, make_run

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
        folder,
        state="failed",
        submission=SUBMITTED | {"script": f"{folder}/sweeps/a/job.sh"},
        attempts=[{"started": NOW, "job_id": "7_0"}],
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
    ("logs", "rank"),
    [
        ({0: RANK_DIED, 3: SHAPES, 1: RANK_DIED}, 0),  # nobody has recorded an error
        ({3: "step 1\n", 0: RANK_DIED}, 3),
        ({2: "", 1: SHAPES, 0: RANK_DIED}, 1),
        ({0: "", 1: ""}, None),
    ],
)
def test_the_rank_that_stopped_first_tells(
    tmp_path: Path, logs: dict[int, str], rank: int | None
) -> None:
    assert telling(failed_run(tmp_path, logs)) == rank


def test_the_rank_that_has_recorded_its_error_tells(tmp_path: Path) -> None:
    run = failed_run(tmp_path, {0: RANK_DIED, 3: SHAPES, 1: "it sleeps\n"})
    now = {"job_id": run.attempt.job_id, "time": NOW}
    Hang(sentence="rank 1 hangs", rank=1, host="n1", state="asleep", **now).put(run.path)
    assert telling(Facts.read(run.path)) == 1
    for rank, key in ((3, now), (0, now | {"restart_count": 7}), (0, now | {"time": 0.0})):
        Failure(error="RuntimeError: mat1 and mat2", rank=rank, **key).put(run.path)
        assert telling(Facts.read(run.path)) == (3 if rank else 1)
    # Older versions have not noted the rank.
    Failure(error="RuntimeError: mat1 and mat2", **now).put(run.path)
    assert telling(Facts.read(run.path)) == 0


def test_logs_shows_why_and_where(tmp_path: Path, no_slurm: None) -> None:
    run = failed_run(tmp_path, {0: RANK_DIED, 3: "step 1\n" * 100 + SHAPES}, KILLED + OOM)
    Failure(error="RuntimeError: mat1", rank=3, job_id=run.attempt.job_id, time=NOW).put(run.path)
    where = ("logs", run.name, "--dir", str(tmp_path))
    done = run_module("hpctrain", *where, "--lines", "5")
    assert done.stdout.startswith(f"{run.name} is failed")
    assert done.stdout.splitlines()[0].endswith("; rank 3 says:")
    assert done.stdout.endswith("step 1\n" + SHAPES + KILLED + OOM)
    files = [run.path / "logs" / "7_0.rank3.log", tmp_path / "sweeps" / "a" / "batch" / "7_0.log"]
    assert done.stderr == "".join(f"==> {file} <==\n" for file in files)
    # The log of a rank that is named is shown without changes.
    assert run_module("hpctrain", *where, "--rank", "0", "--lines", "4").stdout == RANK_DIED
    wrong = run_module("hpctrain", *where, "--rank", "7", code=6)
    assert "no rank 7; there are 0 to 3" in wrong.stderr


def test_a_job_whose_ranks_were_not_started(tmp_path: Path, no_slurm: None) -> None:
    run = failed_run(tmp_path, {}, "module: command not found\n")
    done = run_module("hpctrain", "logs", run.name, "--dir", str(tmp_path))
    assert done.stdout.endswith("\nmodule: command not found\n")


def test_logs_needs_one_run_with_a_log(tmp_path: Path, no_slurm: None) -> None:
    here = {"launcher": "single", "host": "login1"}
    make_run(tmp_path, state="finished", attempts=[here])
    where = ("--dir", str(tmp_path))
    done = run_module("hpctrain", "logs", "digits", *where, code=6)
    assert "no log yet; it is finished" in done.stderr
    assert "are required: RUN" in run_module("hpctrain", "logs", *where, code=2).stderr


def test_attempts_and_ranks_in_a_terminal_have_logs_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = list(logging.getLogger().handlers)

    def attempt(rank: int, error: Exception) -> None:
        with kept(run / "logs", RankInfo("torchrun", rank, rank, world_size=4, local_world_size=4)):
            logging.getLogger("anywhere").warning("a line")
            raise error

    for rank, text in ((0, "first"), (0, "second"), (1, "beside")):
        with pytest.raises(ValueError, match=text):
            attempt(rank, ValueError(text))
    with pytest.raises(ConfigError):
        attempt(2, ConfigError("KEY=1: wrong"))
    with (
        kept(run / "logs", RankInfo("slurm", 3, 3, world_size=4, local_world_size=4)),
        kept(run / "absent" / "logs", RankInfo("single")),
    ):
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
