"""`launch.budget_gpu_hours` on a real Slurm, whose accounting counts the development GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.commands import status
from hpctrain.runs.budget import Budget
from hpctrain.slurm.allocations import allocations
from tests import cluster
from tests.conftest import Completed, run_json, runs
from tests.search.test_search_cluster import SEARCH, found_in

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]


@pytest.mark.slow
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
    why = "1 would not end within launch.budget_gpu_hours"
    assert f"1 of 2 runs queued, 1 not: {why}" in first.stderr
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


@pytest.mark.slow
def test_a_worker_of_a_search_waits_for_room_and_ends_without_it(
    train: Callable[..., Completed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial counts with its time limit, half a GPU-hour, until one has been measured."""
    paced = cluster.Paced(tmp_path / "code", monkeypatch)
    command = (
        *(*SEARCH, "optimizer.lr=choice(1e-3,1e-2)", "hydra.sweeper.n_trials=2", paced.task),
        *("hydra.sweeper.n_jobs=2", "train.max_steps=100", "train.log_every=5"),
        *("launch.gpus_per_node=1", "parallel.device=cpu", "launch.time_min=30"),
        "launch.preflight=off",
    )
    train(*command, "launch.budget_gpu_hours=0.4")
    cluster.wait_for(lambda: found_in(tmp_path / "runs")[1].ended, 240, "the end without room")
    sweep, found = found_in(tmp_path / "runs")
    assert "launch.budget_gpu_hours" in found.ended
    assert not any(run_json(run)["attempts"] for run in runs(tmp_path / "runs"))
    cluster.wait_for(lambda: not cluster.queue(), 120, "the end of the workers")
    train(*command, "launch.budget_gpu_hours=0.6")

    def both_have_asked() -> bool:
        budget = Budget.of(sweep)
        begun = [run for run in runs(tmp_path / "runs") if run_json(run)["attempts"]]
        return budget is not None and len(budget.shares) == 2 and bool(begun)

    cluster.wait_for(both_have_asked, 240, "two workers")
    begun = [run for run in runs(tmp_path / "runs") if run_json(run)["attempts"]]
    assert len(begun) == 1  # the other worker waits
    assert len(cluster.queue()) == 2
    paced.go()
    cluster.wait_for(lambda: found_in(tmp_path / "runs")[1].ended, 400, "the end of the search")
    _, found = found_in(tmp_path / "runs")
    assert [trial.state for trial in found.trials] == ["finished", "finished"]
