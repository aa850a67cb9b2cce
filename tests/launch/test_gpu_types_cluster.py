"""`launch.gpu_type` on a real Slurm, whose nodes have the features of two kinds of GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
FEATURES = {"node1": "ib,a100", "node2": "ib,h100", "node3": "ib,h100", "node4": "h100"}


@pytest.fixture
def features(empty_queue: None) -> None:
    for node, name in FEATURES.items():
        cluster.slurm("scontrol", "update", f"NodeName={node}", f"AvailableFeatures={name}")


@pytest.mark.usefixtures("features")
def test_all_nodes_are_of_one_kind(train: Callable[..., Completed], tmp_path: Path) -> None:
    """The nodes have no real GPUs, so the job says that it does not know them, and goes on."""
    done = train(
        *("-m", "launch.gpu_type=[a100,h100]", "launch.nodes=2", "launch.gpus_per_node=1"),
        *(
            "site.constraint=ib",
            "parallel.device=cpu",
            "launch.preflight=off",
            "train.max_steps=3",
            "tracking=off",
        ),
    )
    assert "on h100: NVIDIA H100" in done.stderr
    jobs = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for_end(jobs)
    (run,) = runs(tmp_path / "runs")
    record = run_json(run)
    assert (record["state"], record["attempts"][0]["hosts"]) == ("finished", ["node2", "node3"])
    (log,) = (tmp_path / "runs" / "sweeps").glob("*/array-0/batch/*.log")
    assert "launch.gpu_type: '' is no known GPU" in log.read_text()
