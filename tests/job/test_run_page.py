"""What a training puts on its page in MLflow, and the cause of its end if rank 1 failed first."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.config.composing.compose import words
from hpctrain.config.schema import Config
from hpctrain.job.run_page import changes, tags
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import AttemptKey
from hpctrain.runs.freeze import freeze
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure
from tests.conftest import Completed, journal, only_run, run_json

Train = Callable[..., Completed]
HOOK = """\
from hpctrain.training import Hook

class Draw(Hook):
    def after_evaluation(self, state):
        from matplotlib.figure import Figure
        figure = Figure()
        figure.add_subplot().plot([1, 2])
        state.tracker.log_figure("curve", figure, state.step)
"""
FAILING = """\
import os
from hpctrain.tasks import Classification

class Failing(Classification):
    def inputs(self, batch):
        if os.environ["RANK"] == "1":
            raise RuntimeError("this rank has failed first")
        return super().inputs(batch)
"""


def test_the_description_tells_how_to_go_on(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path / "my runs"))
    run = RunDir.of(config, "xxh3_128:00")
    given = ["--config-dir", "/x", "experiment=digits", "hooks=[a|b]"]
    freeze(config, run, *words(given))
    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    found = tags(run, alone, {"torch": "2.13"})
    note = found["mlflow.note.content"]
    assert "| `hooks` | `[a\\|b]` |" in note
    assert "python -m hpctrain --config-dir /x experiment=digits 'hooks=[a|b]'" in note
    assert f"python -m hpctrain logs '{run.path}'" in note
    assert found["hpctrain.env.torch"] == "2.13"
    run.update(submission={"script": "job.sh"}, attempts=[{"job_id": "7_1"}, {"job_id": "8_1"}])
    found = tags(run, alone, {})
    assert f"python -m hpctrain resume '{run.path}'" in found["mlflow.note.content"]
    assert found["hpctrain.job_id"] == "7_1 8_1"


def test_changes_of_the_environment() -> None:
    before, now = {"driver": "550", "torch": "2.13"}, {"torch": "2.13", "cuda": "13.0"}
    assert changes(before, now) == ["cuda none -> 13.0", "driver 550 -> none"]


def test_a_failure_of_an_earlier_start_is_not_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="now"), failure.recorded(tmp_path, AttemptKey()):
        raise ValueError("now")
    assert failure.read(tmp_path, AttemptKey()) == "ValueError: now"
    content = json.loads(failure.path(tmp_path).read_text())
    failure.path(tmp_path).write_text(json.dumps({**content, "time": content["time"] - 1e6}))
    assert failure.read(tmp_path, AttemptKey()) is None


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_page_of_a_training(train: Train, tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(HOOK)
    done = train(
        "train.max_epochs=1",
        "optimizer.lr=1e-2",
        "hooks=[{_target_: draw.Draw}]",
        "tracking.drain_s=200",
        PYTHONPATH=str(tmp_path),
    )
    run = only_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as store:
        ((place,),) = store.execute("SELECT artifact_uri FROM runs")
    root = Path(place.removeprefix("file://"))
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    images = {name for name in names if name.startswith("images/curve+step+22+")}
    assert len(images) == 2
    assert {"config.yaml", "logs/terminal_1.rank0.log"} <= names
    with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as store:
        params = dict(store.execute("SELECT key, value FROM params"))
        ((run_id, status),) = store.execute("SELECT run_uuid, status FROM runs")
        ((digest,),) = store.execute("SELECT digest FROM datasets")
    assert status == "FINISHED"
    assert run_json(run)["data_digest"].endswith(digest)
    assert params["optimizer.lr"] == "0.01"
    assert "train.accumulate" not in params
    assert f"/runs/{run_id}" in done.stdout
    assert "runs?workflowType=machine_learning" in done.stdout


@pytest.mark.slow
def test_the_rank_that_failed_first_is_the_cause(train: Train, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    given, mine = ("task._target_=failing.Failing", "tracking.upload=false"), str(tmp_path)
    train(*given, ranks=2, code=1, PYTHONPATH=mine)
    run = only_run(tmp_path)
    cause = "RuntimeError: this rank has failed first"
    assert run_json(run)["attempts"][-1]["error"] == cause
    assert journal(run)[-1]["reason"] == cause
