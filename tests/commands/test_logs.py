"""`hpctrain logs`: why a run has failed, and the end of its output."""

import logging
import os
from pathlib import Path

import pytest

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.errors import ConfigError
from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.first_error import find_fault, rank_logs, tail
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
NCCL = """\
[rank1]: Traceback (most recent call last):
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, internal error
[rank1]: ncclInternalError: Internal check failed.
[rank1]: Last error:
[rank1]: Cuda failure 1 'invalid argument'
"""
WATCHDOG = """\
step 1
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 0 (default_pg) Rank 12] Process group watchdog thread terminated with exception: \
CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call.
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
        # The last line of NCCL's error says what has happened, here and in whose connection.
        ({1: NCCL, 0: SHAPES}, "", "Last error: Cuda failure 1 'invalid argument'", 1, 2),
        ({1: NCCL.replace("Cuda failure", "Connection reset"), 3: SHAPES}, "", "mat1", 3, 4),
        ({1: WATCHDOG, 0: RANK_DIED}, KILLED, "uncorrectable ECC error encountered", 1, 2),
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
    begins = fault.file.read_text().splitlines()[fault.line - 1]
    assert summary in begins or fault.summary.startswith(begins.removeprefix(f"[rank{rank}]: "))


def test_logs_shows_the_error_where_it_stands(tmp_path: Path, no_slurm: None) -> None:
    run = failed_run(tmp_path, {0: RANK_DIED, 3: "step 1\n" * 100 + SHAPES})
    where = ("logs", run.name, "--dir", str(tmp_path))
    shown = run_module("hpctrain", *where).stdout
    file = run.path / "logs" / "7_0.rank3.log"
    assert "rank 3 says:" in shown
    assert f"{file}:104: RuntimeError: mat1 and mat2" in shown
    assert ">   104  [rank3]: RuntimeError" in shown
    # The log of a rank that is named is shown without changes.
    assert run_module("hpctrain", *where, "--rank", "0", "--lines", "4").stdout == RANK_DIED
    wrong = run_module("hpctrain", *where, "--rank", "7", code=6)
    assert "no rank 7; there are 0 to 3" in wrong.stderr


def test_line_numbers_of_a_huge_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1, 700_001)))
    log = tail(path, 0)
    assert 1 < len(log.lines) < 700_000
    assert log.lines[-1] == f"line {log.first + len(log.lines) - 1}"


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
