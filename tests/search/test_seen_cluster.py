"""A search on a real Slurm: what `status` shows of its workers, and how `cancel` ends them."""

from pathlib import Path
from typing import Any

import pytest

from tests import cluster
from tests.conftest import run_json, run_module
from tests.made_runs import status_json
from tests.search.test_search_cluster import SEARCH, found_in

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_cancel_ends_the_workers_and_the_same_command_goes_on(train: Any, tmp_path: Path) -> None:
    cluster.require()
    folder = tmp_path / "runs"
    # The trial ends after half an hour if nobody ends it.
    search = [
        *SEARCH,
        "optimizer.lr=choice(1e-3,1e-2)",
        *(
            "train.max_steps=100000",
            "train.max_epochs=null",
            "train.eval_every=100000",
            "hydra.sweeper.rungs=[50000]",
        ),
        *("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"),
    ]
    train(*search)
    sweep, _ = found_in(folder)

    def training() -> Any:
        told = status_json(folder, sweep.name)["search"]["trials"]
        return [each for each in told if each["state"] == "training" and each["run"]]

    cluster.wait_for(training, 240, "a trial that trains")
    run = folder / training()[0]["run"]
    cluster.wait_for(lambda: (run / "progress.json").exists(), 240, "its first steps")
    shown = run_module("hpctrain", "status", "--dir", str(folder), sweep.name).stdout
    assert "Workers: 1 running, 0 waiting." in shown
    assert "/50000, " in shown
    done = run_module("hpctrain", "cancel", "--save", "--dir", str(folder), sweep.name)
    assert "worker 0 (" in done.stdout
    assert "asked to save and stop" in done.stdout
    cluster.wait_for(
        lambda: not status_json(folder, sweep.name)["search"]["workers"],
        240,
        "the end of the worker",
    )
    attempt = run_json(run)["attempts"][-1]
    assert (run_json(run)["state"], attempt["cause"]) == ("interrupted", "user stop")
    assert attempt["step"] > 0
    (trial,) = found_in(folder)[1].trials
    assert trial.state == "waiting", "it goes on, and is not pruned"
    shown = run_module("hpctrain", "status", "--dir", str(folder), sweep.name).stdout
    assert "No worker runs: the same command goes on" in shown
    train(*search)
    cluster.wait_for(lambda: len(run_json(run)["attempts"]) == 2, 240, "the second attempt")
    # A trial that is cancelled is pruned, and its worker goes on with the other one.
    cluster.wait_for(training, 240, "the trial to go on")
    cluster.wait_for(
        lambda: run_json(run)["state"] == "running",
        240,
        "its steps",
    )
    run_module("hpctrain", "cancel", "--dir", str(folder), run.name)
    cluster.wait_for(lambda: len(found_in(folder)[1].trials) == 2, 240, "the other trial")
    assert found_in(folder)[1].trials[0].state == "pruned"
    run_module("hpctrain", "cancel", "--dir", str(folder), sweep.name)
    cluster.wait_for(
        lambda: not status_json(folder, sweep.name)["search"]["workers"],
        240,
        "the end of the worker",
    )
