"""submitit is on the road: what is submitted goes through its executors, which are ours."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.core import Executor

import hpctrain
from hpctrain.cluster.slurm import partition_limit, sbatch
from hpctrain.commands import resume
from hpctrain.config.composing import compose as command_line
from hpctrain.errors import ConfigError
from hpctrain.launch.executors import LocalExecutor, SlurmExecutor
from tests import forkserver

SLURM = {
    "sbatch": 'case $1 in --test-only) echo "sbatch: Job 1 to start" >&2;; *) echo 7;; esac',
    "scontrol": "echo MaxArraySize = 1001",
    "squeue": "exit 0",
    "sacct": "exit 0",
    "sinfo": "exit 0",
    "srun": "exit 1",
}
FUNCTIONS = """\
import submitit

def add(a, b=0):
    return a + b

def where_i_am():
    job = submitit.JobEnvironment()
    return job.cluster, job.global_rank, job.num_tasks
"""


@pytest.fixture
def where(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of runs in tmp_path/runs; ranks that start here do so in milliseconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", forkserver.Popen)
    (tmp_path / "functions_to_submit.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm that takes every job, and knows none of them afterwards."""
    answers = (
        sbatch.max_array_size,
        partition_limit.cluster_config,
        partition_limit.partition_lines,
    )
    for answer in answers:
        answer.cache_clear()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    yield
    for answer in answers:
        answer.cache_clear()


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes whose `submit` or `map_array` was called, in this order."""
    seen: list[type] = []

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *given: seen.append(type(self)) or method(self, *given)

    for name in ("submit", "map_array"):
        monkeypatch.setattr(Executor, name, noted(getattr(Executor, name)))
    return seen


def test_all_that_is_submitted_goes_through_the_executor_of_submitit(
    where: list[str], slurm: None, road: list[type], tmp_path: Path
) -> None:
    from functions_to_submit import add  # type: ignore[import-not-found]

    assert issubclass(SlurmExecutor, submitit.SlurmExecutor)
    more = ["tracking=off", "launch.snapshot=off"]
    jobs = hpctrain.submit(*where, *more, "seed=1,2")
    assert [job.job_id for job in jobs] == ["7_0", "7_1"]
    command_line.compose(["-m", *where, *more, "seed=3"])
    assert resume.main(["--dir", f"{tmp_path}/runs"]) == 0
    job = hpctrain.submit_function(add, 1, overrides=[where[2], "launch.snapshot=off"])
    assert (job.job_id, job.paths.submission_file.name) == ("7_0", "job.sh")
    assert road == [SlurmExecutor] * 4
    assert not [*tmp_path.rglob("*.pkl")]


def test_what_runs_here_goes_through_the_local_executor_of_submitit(
    where: list[str], no_slurm: None, road: list[type], tmp_path: Path
) -> None:
    from functions_to_submit import add

    assert issubclass(LocalExecutor, submitit.LocalExecutor)
    more = ["tracking=off", "launch.snapshot=off"]
    (run,) = hpctrain.submit(*where, *more, "train.max_steps=1")
    job = hpctrain.submit_function(add, 1, b=2, overrides=[where[2], "launch.snapshot=off"])
    assert (run.state, job.result()) == ("COMPLETED", 3)
    assert road == [LocalExecutor] * 2
    assert not [*tmp_path.rglob("*.pkl")]


def test_the_auto_executor_of_submitit_submits_functions(
    where: list[str], slurm: None, road: list[type], tmp_path: Path
) -> None:
    from functions_to_submit import add

    executor = submitit.AutoExecutor("jobs", "hpctrain", hpctrain_overrides=["launch.snapshot=off"])
    executor.update_parameters(
        name="adds", timeout_min=7, nodes=2, tasks_per_node=3, cpus_per_task=4, mem_gb=5
    )
    executor.update_parameters(
        slurm_partition="gpu", slurm_array_parallelism=2, slurm_qos=None, slurm_job_name="sums"
    )
    jobs = executor.map_array(add, [1, 2, 3], [4, 5, 6])
    assert [job.job_id for job in jobs] == ["7_0", "7_1", "7_2"]
    assert jobs[2].submission().args == [3, 6]
    text = jobs[0].paths.submission_file.read_text()
    assert jobs[2].paths.submission_file == jobs[0].paths.submission_file
    for option in (
        *("job-name=sums", "time=7", "nodes=2", "ntasks-per-node=3", "cpus-per-task=4"),
        *("mem=5120M", "partition=gpu", "array=0-2%2"),
    ):
        assert f"#SBATCH --{option}\n" in text
    assert "--qos" not in text
    with executor.batch():
        job = executor.submit(add, 1)
    assert job.job_id == "7_0"
    assert road == [submitit.AutoExecutor, SlurmExecutor] * 2
    assert not [*tmp_path.rglob("*.pkl")]
    # Another cluster's parameters are submitit's affair.
    slurm_s = submitit.AutoExecutor("others", "slurm")
    slurm_s.update_parameters(slurm_partition="gpu", slurm_comment="x")
    assert slurm_s.parameters["partition"] == "gpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slurm_wckey": "x"}, "unknown key slurm_wckey: of submitit's keys these are read: nodes"),
        ({"timeout": 3}, "unknown key timeout: of submitit's keys these are read"),
        ({"slurm_gpus_per_task": 1}, "slurm_gpus_per_task: use launch.gpus_per_node with site"),
        ({"timeout_min": "soon"}, "launch.time_min=soon: it must be of type integer"),
        ({"slurm_mem": "20GB"}, "launch.mem_gb"),
    ],
)
def test_a_parameter_that_the_auto_executor_does_not_read_is_refused(
    given: dict[str, object], words: str, tmp_path: Path
) -> None:
    executor = submitit.AutoExecutor(tmp_path / "jobs", "hpctrain")

    def submit() -> None:
        executor.update_parameters(**given)
        executor.submit(len, [1])

    with pytest.raises(ConfigError, match=words):
        submit()
    assert not (tmp_path / "jobs").exists()


def test_the_auto_executor_runs_functions_here_and_refuses_what_a_job_cannot_import(
    where: list[str], no_slurm: None, road: list[type], tmp_path: Path
) -> None:
    from functions_to_submit import add, where_i_am

    executor = submitit.AutoExecutor("jobs", "hpctrain", hpctrain_overrides=["launch.snapshot=off"])
    executor.update_parameters(tasks_per_node=2)
    jobs = executor.map_array(add, [1, 2], [3, 4])
    assert [job.results() for job in jobs] == [[4, 4], [6, 6]]
    assert executor.submit(where_i_am).results() == [["local", 0, 2], ["local", 1, 2]]
    assert road[1:] == [LocalExecutor] * 2 + [submitit.AutoExecutor, LocalExecutor]
    with pytest.raises(ConfigError, match=r"is not at the top of its module, so a job cannot"):
        executor.submit(lambda: 3)
    assert not [*tmp_path.rglob("*.pkl")]
