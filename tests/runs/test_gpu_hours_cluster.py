"""`launch.budget_gpu_hours` on a real Slurm, whose accounting counts the development GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.commands import status
from hpctrain.slurm.allocations import allocations
from tests import cluster
from tests.conftest import Completed, run_json, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]


def test_a_sweep_goes_on_when_its_runs_have_taken_less(
    train: Callable[..., Completed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run counts with its time limit, half a GPU-hour; then it is measured."""
    command = (
        *("-m", "seed=0,1", "launch.gpus_per_node=1", "parallel.device=cpu", "launch.time_min=30"),
        *("launch.budget_gpu_hours=0.6", "launch.preflight=off"),
        *("train.max_steps=30", "train.log_every=5", "tracking.upload=false"),
    )
    first = train(*command, code=4)
    assert (
        "1 of 2 runs are not queued: 1 would not end within launch.budget_gpu_hours" in first.stderr
    )
    cluster.wait_for_end(cluster.job_ids(tmp_path / "runs"))
    assert len(runs(tmp_path / "runs")) == 1
    second = train(*command)
    assert "spent (booked by Slurm)" in second.stderr
    jobs = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for_end(jobs)
    assert [run_json(run)["state"] for run in runs(tmp_path / "runs")] == ["finished"] * 2
    booked = allocations(jobs)
    assert booked is not None
    times = [one for job in jobs for one in booked[job]]
    assert [one.gpus for one in times] == [1, 1]
    hours = sum((one.end or 0) - (one.start or 0) for one in times) / 3600
    status.main(["--dir", str(tmp_path / "runs")])
    said = " ".join(capsys.readouterr().out.split())
    assert f"budget of 0.6 GPU-hours: {hours:.4g} spent (booked by Slurm), " in said
