"""How often a submission and its jobs call a real scheduler: each call is noted and passed on."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.slurm import release
from hpctrain.cluster.slurm.queue import call
from tests import cluster
from tests.conftest import Completed, only_run, run_json

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
SHORT = ("train.max_steps=2", "tracking=off", "launch.wait=true")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """A function that returns how often each command was called, also in the jobs."""
    folder, noted = tmp_path / "counting", tmp_path / "calls"
    folder.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr"):
        real = shutil.which(name)
        (folder / name).write_text(f'#!/bin/sh\necho {name} >>{noted}\nexec {real} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return lambda: Counter(noted.read_text().split())


def test_a_run(train: Train, calls: Callable[[], Counter[str]]) -> None:
    train("-m", "seed=1", *SHORT)
    assert calls()["sbatch"] == 2  # --test-only
    assert calls().total() < 10  # with those of the job itself


@pytest.mark.slow  # test_a_run counts, too, and launch/test_chain has its jobs
def test_a_chain(train: Train, calls: Callable[[], Counter[str]]) -> None:
    train("-m", "seed=1", *SHORT, "launch.chain=3")
    assert calls()["sbatch"] == 4
    assert calls().total() < 15


@pytest.mark.slow
def test_a_sweep_of_1000(train: Train, calls: Callable[[], Counter[str]]) -> None:
    train("-m", "seed=range(0,1000)", "tracking=off", "+site.sbatch.hold=true")
    assert len(cluster.queue()) == 1000
    assert calls().total() < 10


@pytest.mark.slow
def test_expedited_runs_come_back_at_once_and_are_not_held(
    train: Train, tmp_path: Path, paced: cluster.Paced
) -> None:
    if release.is_before((25, 11)):
        pytest.skip(f"{release.words()} has no --requeue=expedite")
    if "enable_expedited_requeue" not in cluster.slurm("scontrol", "show", "config"):
        pytest.skip("dev-cluster up --set SlurmctldParameters=enable_expedited_requeue")
    own = ("train.max_epochs=16", "checkpoint.every_steps=20", "tracking=off", paced.task)
    train("-m", *own, "+site.sbatch.requeue=expedite")
    run = only_run(tmp_path)
    cluster.wait_for_step(run, 20)
    job = cluster.job_id(run)
    call("scontrol", "requeue", job).check_returncode()
    # Slurm lets others wait for two minutes.
    cluster.wait_for(lambda: len(run_json(run)["attempts"]) == 2, 60, "the second attempt")
    paced.fail()
    cluster.wait_for(lambda: run_json(run)["state"] == "failed", 180, "the failure")
    assert cluster.wait_for_end([job]) == {job: "FAILED"}  # not REQUEUE_HOLD
