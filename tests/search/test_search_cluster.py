"""Searches on the development cluster: workers that outlive the command, kills and preemptions."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.search.trials import FoundSearch
from tests import cluster, forkserver
from tests.conftest import run_json, runs
from tests.search.conftest import HELD

pytestmark = pytest.mark.slurm
QUIET = ("tracking=off", "launch.snapshot=off")
SEARCH = (
    *("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", *QUIET),
    *("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"),
)


def found_in(folder: Path) -> tuple[Path, FoundSearch]:
    """Return the folder of the only search in an output folder, and the search."""
    (file,) = folder.glob("sweeps/*/search.json")
    found = FoundSearch.of(file.parent)
    return file.parent, found


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_cluster")
def test_workers_outlive_the_command_and_a_trial_that_fails(
    train: Any, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (hold := tmp_path / "hold").touch()
    search = [
        *(*SEARCH, "task._target_=held.Task"),
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.in_features=choice(64,3)",
        *("train.max_steps=18", "hydra.sweeper.rungs=[2,6]"),
        *("hydra.sweeper.n_jobs=3", "hydra.sweeper.n_trials=9", "launch.wait=true"),
    ]
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    command = [sys.executable, "-m", "hpctrain", *where, *search]

    def start() -> forkserver.Popen:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return forkserver.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)

    with open(tmp_path / "said", "w+") as output:
        process = start()
        cluster.wait_for(
            lambda: [*tmp_path.glob("runs/sweeps/*/workers/array-0/job_id")], 120, "a job"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start()
        enough = "workers submitted: none, enough live"
        cluster.wait_for(
            lambda: enough in (tmp_path / "said").read_text(), 240, "the search to go on"
        )
        hold.unlink()
        assert process.wait(900) == 0
    said = (tmp_path / "said").read_text()
    assert "continues: " in said
    sweep, found = found_in(tmp_path / "runs")
    assert found.ended
    assert len(found.trials) == 9
    assert {trial.state for trial in found.trials} == {"failed", "pruned", "finished"}
    assert all("model.in_features" in trial.params for trial in found.trials)
    wrong = [trial for trial in found.trials if trial.params["model.in_features"] == "3"]
    assert {trial.state for trial in wrong} == {"failed"}
    assert all(trial.reason for trial in wrong)
    best = found.best
    assert best is not None
    assert best.value == max(t.value for t in found.at("finished"))
    assert f"(trial {best.number})" in said
    records = [run_json(run) for run in runs(tmp_path / "runs")]
    assert {record["sweep"]["uid"] for record in records} == {found.uid}
    assert {record["state"] for record in records} == {"failed", "paused", "finished"}
    # The second command found three workers that live.
    assert len([*sweep.glob("workers/*/worker.json")]) == 3
