"""hpctrain from Python on a real Slurm: jobs of submitit, and functions as ranks."""

import asyncio
from pathlib import Path

import pytest
import submitit

import hpctrain
from hpctrain.errors import LaunchError
from tests import cluster
from tests.conftest import run_json

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
FUNCTIONS = """\
import os, time
import submitit

def total(start, *, scale):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return {"sum": value * scale, "host": os.uname().nodename}

def place(value):
    job = submitit.JobEnvironment()
    return [value, job.cluster, job.job_id, job.global_rank]

def broken(rank):
    if os.environ["RANK"] == str(rank):
        raise ValueError("as asked")
    time.sleep(100)
"""


def test_runs_and_functions_are_jobs_of_submitit(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs are queued at once, so that they run side by side."""
    (tmp_path / "functions_of_a_user.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import functions_of_a_user as functions  # type: ignore[import-not-found]

    output = f"output_dir={tmp_path}/runs"
    in_place = "launch.snapshot=off"  # the tests of a submission have the copies
    where = ["experiment=digits", f"data.path={digits}", output, "tracking=off", in_place]
    size = ["train.max_steps=3", "hydra.launcher.timeout_min=5"]
    good, bad = hpctrain.submit(*where, *size, "model.in_features=64,3")
    (held,) = hpctrain.submit(*where, "seed=7", "+site.sbatch.hold=true")
    total = hpctrain.submit_function(
        functions.total, 10, scale=2, nodes=2, overrides=[output, in_place]
    )
    broken = hpctrain.submit_function(functions.broken, 1, nodes=2, overrides=[output, in_place])
    waits = hpctrain.submit_function(
        functions.broken, 0, overrides=[output, in_place, "name=waits", "+site.sbatch.hold=true"]
    )
    executor = submitit.AutoExecutor(tmp_path / "runs", "hpctrain", hpctrain_overrides=[in_place])
    executor.update_parameters(timeout_min=5, tasks_per_node=2, slurm_partition="batch")
    mapped = executor.map_array(functions.place, [3, 4])
    with pytest.raises(LaunchError, match=r"launch\.nodes=65: it needs 65 nodes"):
        hpctrain.submit_function(functions.broken, 1, nodes=65, overrides=[output])

    assert isinstance(good, submitit.SlurmJob)
    assert held.job_id in cluster.queue()  # the others may have ended
    assert (held.state, held.done()) == ("PENDING", False)
    held.cancel()
    assert held.exception() is not None
    cluster.wait_for(lambda: held.get_info()["State"] == "CANCELLED", 60, "sacct")
    assert (held.state, held.done()) == ("CANCELLED", True)
    assert waits.state == "PENDING"
    waits.cancel()
    cluster.wait_for(lambda: waits.get_info()["State"] == "CANCELLED", 60, "sacct")
    # Somebody else finds the job of the run that is under way.
    (found,) = hpctrain.submit(*where, *size)
    assert found.job_id in (good.job_id, "")

    record = run_json(good.run.path) if good.result() is not None else {}
    assert record["state"] == "finished"
    assert asyncio.run(found.awaitable().result()) == record["result"]["val/accuracy"]
    assert "#SBATCH --time=5\n" in good.paths.submission_file.read_text()
    assert "step 3/3" in (good.stdout() or "")
    with pytest.raises(
        LaunchError, match=r"is failed, not finished: see .* \(RuntimeError: mat1 and mat2 "
    ):
        bad.result()
    assert bad.state in ("FAILED", "COMPLETING", "RUNNING")  # Slurm cleans up after it

    results = total.results()
    assert [result["sum"] for result in results] == [2 * (2 * 10 + 1)] * 2
    assert len({result["host"] for result in results}) == 2
    assert total.result() == results[0]
    for number, job in enumerate(mapped):
        assert job.job_id == mapped[0].job_id.replace("_0", f"_{number}")
        assert job.results() == [[3 + number, "hpctrain", job.job_id, rank] for rank in (0, 1)]
    error = broken.exception()
    assert isinstance(error, LaunchError)
    assert isinstance(error, submitit.core.utils.FailedJobError)
    assert "rank 1:\nTraceback" in str(error)
    assert str(error).rstrip().endswith("ValueError: as asked")
    assert not list((tmp_path / "runs").rglob("*.pkl"))
