"""What MLflow has of a sweep, a run and a failed run, by its database."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.tracking import samples
from tests.conftest import Completed, run_json, runs

Train = Callable[..., Completed]


@pytest.mark.slow
def test_a_sweep_a_run_and_a_failed_run(
    train: Train, digits: Path, store: Path, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    data = shutil.copytree(digits, tmp_path / "my-digits")
    train(
        *("-m", f"data.path={data}", "optimizer.lr=1e-2,1e10", "train.max_steps=20"),
        *("train.nonfinite=stop", "tracking.drain_s=400", "monitor.every_s=0.5"),
        code=4,
        **no_sbatch,
    )
    good, bad = sorted(runs(tmp_path / "runs"), key=lambda run: run_json(run)["state"] == "failed")
    # A second node, as the monitor there would write its samples.
    writer = samples.Writer(samples.folder(good) / "node2.jsonl")
    writer.write(1e9, metrics={"gpu_0_power_usage_watts": 321.0}, facts={"gpu_0": "NVIDIA H100"})
    writer.close()
    for run in (good, bad):
        sync = [sys.executable, "-m", "hpctrain", "status", "--upload", str(run)]
        subprocess.run(sync, check=True, stdout=subprocess.DEVNULL)
    with closing(sqlite3.connect(store)) as database:

        def ask(query: str, *values: str) -> list[tuple[str, ...]]:
            return database.execute(query, values).fetchall()

        ids = dict(ask("SELECT name, run_uuid FROM runs"))
        parent, best, failed = (
            next(name for name in ids if name.startswith(start))
            for start in ("sweep ", good.name, bad.name)
        )
        assert [best, failed] == [f"{good.name} lr=0.01", f"{bad.name} lr=10000000000.0"]
        tags = {
            name: dict(ask("SELECT key, value FROM tags WHERE run_uuid=?", ids[name]))
            for name in (parent, best, failed)
        }
        measured = dict(ask("SELECT key, value FROM latest_metrics WHERE run_uuid=?", ids[best]))
        ((place,),) = ask("SELECT artifact_uri FROM runs WHERE run_uuid=?", ids[best])
    assert len(ids) == 3
    told = tags[parent]["mlflow.note.content"]
    for text in ("1 of 2 finished, 1 failed", f"[{best}](", "gradient is not finite since step"):
        assert text in told
    assert "Resume, status and logs:" in tags[best]["mlflow.note.content"]
    assert tags[best]["hpctrain.node.node2"] == "gpu_0=NVIDIA H100"
    assert measured["system/node2/gpu_0_power_usage_watts"] == 321.0
    note = tags[failed]["mlflow.note.content"]
    assert note.splitlines()[1].startswith("**Failed**: non-finite: gradient is not finite since")
    root = Path(place.removeprefix("file://"))
    assert {"config.yaml", "checkpoints.json", "logs"} < {path.name for path in root.iterdir()}
