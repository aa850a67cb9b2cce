"""Runs that go on from a checkpoint of another run, with its history and its next samples."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.commands.resume import main as resume
from hpctrain.errors import ConfigError
from hpctrain.results.commands.branch import branch
from tests.conftest import Completed, journal_metrics, run_json, run_module, runs

Train = Callable[..., Completed]
LONG = ("monitor.enabled=false", "scheduler=constant", "train.log_every=1", "train.eval_every=4")


def test_a_finished_run_is_prolonged(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = "tracking.upload=false"
    train(*LONG, off, "train.max_steps=8")
    (whole,) = runs(tmp_path / "runs")
    train(*LONG, off, "train.max_steps=4")
    (parent,) = set(runs(tmp_path / "runs")) - {whole}
    assert run_json(parent)["state"] == "finished"
    capsys.readouterr()
    assert resume([str(parent), "train.max_steps=8"]) == 0
    assert f"resume --branch {parent.name} train.max_steps=N" in capsys.readouterr().out
    made = branch(parent, ["train.max_steps=8"])
    assert made.path not in (parent, whole)
    assert branch(parent, ["train.max_steps=8"]).path == made.path
    run_module("hpctrain", "run", str(made.path))
    # It has made the steps of the run that had so many from the start, with the same bits.
    metrics = journal_metrics(made.path)
    assert metrics == journal_metrics(whole)
    assert {step for _, step in metrics} == {*range(1, 9)}
    record = run_json(made.path)
    assert record["parent"] == {"run": str(parent), "uid": run_json(parent)["uid"], "step": 4}
    assert record["uid"] != run_json(parent)["uid"]
    with pytest.raises(ConfigError, match="so nothing would be left to train"):
        branch(parent, [])
    with pytest.raises(ConfigError, match="optimizer"):
        branch(parent, ["optimizer.rl=1"])


@pytest.mark.slow
def test_a_branch_has_its_lineage_and_its_history_in_mlflow(
    train: Train, store: Path, tmp_path: Path
) -> None:
    train(*LONG, "train.max_steps=4", "checkpoint.every_steps=2", "tracking.drain_s=200")
    (parent,) = runs(tmp_path / "runs")
    given = ("--step", "2", "optimizer.lr=0.01", "--dir", f"{tmp_path}/runs")
    path = run_module("hpctrain", "resume", "--branch", parent.name, *given).stdout.strip()
    run_module("hpctrain", "run", path)
    with sqlite3.connect(store) as db:
        tags = "select run_uuid from tags where key = ? and value = ?"
        (run,) = db.execute(tags, ("hpctrain.parent_uid", run_json(parent)["uid"])).fetchone()
        points = db.execute(
            "select step from metrics where run_uuid = ? and key = 'train/loss' order by step",
            (run,),
        ).fetchall()
        (rate,) = db.execute(
            "select value from params where run_uuid = ? and key = 'optimizer.lr'", (run,)
        ).fetchone()
    assert [step for (step,) in points] == [1, 2, 3, 4]
    assert rate == "0.01"
    assert json.loads((Path(path) / "run.json").read_text())["parent"]["step"] == 2
