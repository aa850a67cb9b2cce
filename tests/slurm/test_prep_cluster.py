"""On a real Slurm, an array of slurm/preprocess.sbatch writes one data set."""

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


@pytest.mark.slow  # tests/data_prep/test_parts.py has parts that are killed, and made twice
def test_an_array_over_nodes_with_a_task_that_is_preempted(here: Path) -> None:
    slow = script(here.parent / "python", SLOW)
    (here / "slow").touch()
    shape = ("--partition=preemptible", "--exclusive", "--array=1-4", "preprocess.sbatch")
    job = submit(here, *shape, "arrays", "x.npy", OUT, *GIVEN, python=str(slow))
    tasks = [f"{job}_{i}" for i in range(1, 5)]
    cluster.wait_for(lambda: any(12 <= n < 24 for n in pieces(here)), 180, "pieces of part 2")
    assert cluster.tool("preempt", tasks[1]).returncode == 0
    cluster.wait_for(lambda: cluster.job_state(tasks[1]) == "PENDING", 180, "the requeue")
    assert 0 < sum(12 <= n < 24 for n in pieces(here)) < 12
    (here / "slow").unlink()
    come_back(tasks[1])
    assert ended(here, *tasks) == ["COMPLETED|0:0"] * 4
    assert "goes on, " in output(here, tasks[1])
    assert as_the_reference(here)
    nodes = cluster.slurm("sacct", "-X", "--noheader", "--format=NodeList%20", "--jobs", job)
    assert len(set(nodes.split())) > 2
    # When everything is done, one of the tasks runs again, and so does the whole array.
    before = (here / OUT / "index.json").stat().st_mtime_ns
    cluster.slurm("scontrol", "requeue", tasks[0])
    come_back(tasks[0])
    job = submit(here, "--array=1-4", "preprocess.sbatch", "arrays", "x.npy", OUT, *GIVEN)
    assert ended(here, tasks[0], *(f"{job}_{i}" for i in range(1, 5))) == ["COMPLETED|0:0"] * 5
    assert "already holds this data set" in output(here, tasks[0])
    assert (here / OUT / "index.json").stat().st_mtime_ns == before
