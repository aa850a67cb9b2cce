"""A GPU that is lost on a node of a real Slurm; GPUs are planted (tests/doctor/planted_gpus.py)."""

from pathlib import Path
from typing import Any

import pytest

from hpctrain.slurm import excluded_hosts
from tests import cluster
from tests.conftest import run_json, run_module, runs
from tests.doctor.planted_gpus import PlantedGpus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]


def restarted(run: Path, job: str, attempts: int) -> dict[str, Any]:
    """Wait until so many attempts have ended with a requeue, let the job start, return run.json."""

    def over() -> bool:
        found = run_json(run)["attempts"]
        return len(found) == attempts and found[-1].get("state") == "interrupted"

    cluster.wait_for(over, 240, f"the end of attempt {attempts}")
    assert cluster.tool("hurry", job).returncode == 0
    return run_json(run)


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_gpu_that_is_lost_for_good(node: str, digits: Path, tmp_path: Path) -> None:
    """The node of rank 0, or the other one, is left, though its ranks end before their checks."""
    gpus, output = PlantedGpus(tmp_path / "gpus"), str(tmp_path / "runs")
    gpus.let_be({node: {"dies": True}})
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}", "tracking=off"]
    where += ["launch.gpus_per_node=2", "launch.snapshot=off", gpus.override]
    run_module("hpctrain", "-m", *where, "train.max_steps=3", "launch.nodes=2")
    (run,) = runs(Path(output))
    job = cluster.job_id(run)
    (first,) = restarted(run, job, 1)["attempts"]
    assert first["reason"] == f"GPU fault on {node}: RuntimeError: CUDA error: unknown error"
    assert excluded_hosts.read(output) == {}
    second = restarted(run, job, 2)["attempts"][1]
    assert "torch sees no GPU here" in second["reason"]
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    assert {*excluded_hosts.read(output)} == {node}
    hosts = [one["hosts"] for one in run_json(run)["attempts"]]
    assert hosts[:2] == [["node1", "node2"]] * 2
    assert len(hosts) == 3
    assert node not in hosts[2]
