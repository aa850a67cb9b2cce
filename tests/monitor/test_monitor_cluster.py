"""The monitor in jobs of a real Slurm."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, runs
from tests.doctor.planted_gpus import PlantedGpus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
LINE = '"gpu_0_memory_usage_megabytes"'


def test_two_jobs_on_one_node_do_not_see_each_others_gpus(
    train: Callable[..., Completed], tmp_path: Path, paced: "cluster.Paced"
) -> None:
    """Slurm gives each of them one of the two GPUs of node1, which NVML's stand-in would show."""
    gpus = PlantedGpus(tmp_path / "gpus")
    train(
        *("-m", "seed=1,2", "train.max_steps=100000", paced.task, "tracking.upload=false"),
        *("launch.gpus_per_node=1", "launch.snapshot=off", "monitor.every_s=0.5"),
        *(f"{gpus.override}:{tmp_path}/paced", "+site.sbatch.nodelist=node1"),
    )
    both = runs(tmp_path / "runs")

    def sampled() -> list[str]:
        files = [run / "monitor" / "node1.jsonl" for run in both]
        return [file.read_text() for file in files if file.exists() and LINE in file.read_text()]

    cluster.wait_for(lambda: len(sampled()) == 2, 240, "samples of both jobs at the same time")
    known = [(run / "monitor" / "node1.0.gpus").read_text().split() for run in both]
    assert sorted(known) == [["GPU-a"], ["GPU-b"]]
    paced.go()
    for run, text in zip(both, sampled(), strict=True):
        names = {name for line in text.splitlines() for name in json.loads(line).get("metrics", {})}
        assert {name[:5] for name in names if name.startswith("gpu_")} == {"gpu_0"}, run
    assert all(run_json(run)["attempts"][0]["hosts"] == ["node1"] for run in both)
