"""On a real Slurm, a job of slurm/preprocess.sbatch writes a data set."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import cluster
from tests.conftest import run_module
from tests.data_prep.crash import content
from tests.slurm.test_templates import come_back, ended, output, script, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
OUT = "it's $(touch oops) & out"
GIVEN = ("--shard-size", "20KB", "--split", "train=0.8,val=0.2")
# A Python in which each fsync takes a second as long as the file `slow` exists.
SLOW = f"""\
exec {sys.executable} -c '
import os, sys, time
real = os.fsync
def fsync(descriptor):
    if os.path.exists("slow"):
        time.sleep(1)
    real(descriptor)
os.fsync = fsync
from data_prep.cli import main
sys.exit(main(sys.argv[3:]))' "$@"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a folder with data, from which jobs are submitted. The reference lies beside it."""
    folder = tmp_path / "it's $(touch oops) & mine"
    folder.mkdir()
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(6000, 20)))
    local = (str(folder / "x.npy"), str(tmp_path / "reference"), *GIVEN)
    run_module("data_prep", "arrays", *local, "--workers", "1")
    return folder


def as_the_reference(here: Path) -> bool:
    """Return whether OUT is the same data set that a conversion without Slurm wrote."""
    assert "oops" not in os.listdir(here)
    return content(here / OUT) == content(here.parent / "reference")


def pieces(here: Path) -> list[int]:
    """Return the numbers of the finished pieces."""
    folder = here / OUT / ".hpctrain-partial" / "pieces"
    return [int(p.name) for p in folder.glob("[0-9]*")] if folder.exists() else []


@pytest.mark.slow  # tests/data_prep/test_resume_prep.py has conversions that are killed
def test_a_job_that_is_preempted_goes_on(here: Path) -> None:
    slow = script(here.parent / "python", SLOW)
    (here / "slow").touch()
    shape = ("--partition=preemptible", "preprocess.sbatch")
    job = submit(here, *shape, "arrays", "x.npy", OUT, *GIVEN, python=str(slow))
    cluster.wait_for(lambda: 0 < len(pieces(here)) < 40, 180, "some pieces")
    assert cluster.tool("preempt", job).returncode == 0
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
    assert pieces(here)
    (here / "slow").unlink()
    come_back(job)
    assert ended(here, job) == ["COMPLETED|0:0"]
    assert "goes on, " in output(here, job)
    assert as_the_reference(here)
    # When everything is done, the job runs again.
    before = (here / OUT / "index.json").stat().st_mtime_ns
    cluster.slurm("scontrol", "requeue", job)
    come_back(job)
    assert ended(here, job) == ["COMPLETED|0:0"]
    assert "already holds this data set" in output(here, job)
    assert (here / OUT / "index.json").stat().st_mtime_ns == before
