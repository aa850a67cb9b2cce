"""Several runs in one job (launch.pack)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs

Train = Callable[..., Completed]
PACKED = """\
import os, signal
from hpctrain.tasks import Classification

class Packed(Classification):
    calls = 0

    def __init__(self, *, fault="none", **options):
        super().__init__(**options)
        self.fault = fault

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 25 and self.fault == "error":
            raise ValueError("as asked")
        once = f"{os.path.dirname(__file__)}/killed"
        if self.calls == 25 and self.fault == "kill" and not os.path.exists(once):
            open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(model, batch)
"""


def by_fault(folder: Path) -> dict[str, Path]:
    """Return the run directories by the value of +task.fault."""
    return {run_json(run)["swept"][0].partition("=")[2]: run for run in runs(folder)}


@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_three_runs_share_a_whole_node(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails, one is killed and starts again, one is left alone."""
    (tmp_path / "packed.py").write_text(PACKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    train(
        "-m",
        *("task._target_=packed.Packed", "+task.fault=none,error,kill", "launch.pack=3"),
        *("train.max_steps=60", "checkpoint.every_steps=20", "tracking=off"),
        *("launch.mem_gb=2", "+site.sbatch.exclusive=true", "parallel.device=cpu"),
    )
    (job,) = {*cluster.job_ids(tmp_path / "runs")}
    # The job fails as one of its runs has failed.
    assert cluster.wait_for_end([job]) == {job: "FAILED"}
    found = by_fault(tmp_path / "runs")
    records = {fault: run_json(run) for fault, run in found.items()}
    assert {fault: record["state"] for fault, record in records.items()} == {
        "none": "finished",
        "error": "failed",
        "kill": "finished",
    }
    verdicts = {
        fault: [one.get("verdict") for one in record["attempts"]]
        for fault, record in records.items()
    }
    assert verdicts == {"none": [None], "error": ["failed"], "kill": ["restart", None]}
    keys = [
        (one["restart_count"], one["step_id"])
        for record in records.values()
        for one in record["attempts"]
    ]
    assert sorted(keys) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert records["kill"]["attempts"][1]["first_step"] == 20
    assert "ValueError: as asked" in records["error"]["attempts"][0]["error"]
    said = (found["kill"] / "logs" / f"{job}.batch.log").read_text()
    assert "another one begins" in said
    assert "another one begins" not in (found["none"] / "logs" / f"{job}.batch.log").read_text()
    fields = ("sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=AllocTRES")
    shares = cluster.slurm(*fields).splitlines()
    assert shares[0].startswith("billing=8,cpu=8")
    assert all("cpu=1" in share for share in shares[2:])
    assert run_module("hpctrain", "status", str(tmp_path / "runs")).count("finished") >= 2
