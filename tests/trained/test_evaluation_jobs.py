"""`evaluation.job=true`: each checkpoint is evaluated by a job of its own."""

import json
import math
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpctrain import load_run
from hpctrain.checkpoint.files.manifest import Manifest
from hpctrain.commands.checkpoints import look
from hpctrain.commands.gc import _checkpoints
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.job.building.evaluation_jobs import EvaluationJobs
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.evaluation_requests import without_result
from hpctrain.runs.freeze import check
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import state
from hpctrain.runs.state.facts import Facts
from hpctrain.slurm.queue import Job
from hpctrain.tracking import recorded
from tests import cluster
from tests.bounds import EXACT
from tests.cluster import Paced
from tests.conftest import Completed, run_json, run_module, runs

Train = Callable[..., Completed]


def config(digits: Path, tmp_path: Path, **evaluation: Any) -> Config:
    made = Config()
    sizes = {"in_features": 64, "hidden": [8], "out_features": 10}
    made.model = {"_target_": "hpctrain.models.MLP", **sizes}
    made.task = {"_target_": "hpctrain.tasks.Classification"}
    made.data.path, made.output_dir, made.train.max_steps = str(digits), str(tmp_path), 4
    made.evaluation.job = True
    for name, value in evaluation.items():
        setattr(made.evaluation, name, value)
    return made


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: setattr(c.checkpoint, "best", "val/los"), r"checkpoint.best=val/los: did you"),
        (lambda c: setattr(c.train.early_stopping, "metric", "val/loss"), "use train/NAME, or"),
        (lambda c: setattr(c.data, "val_split", None), "there is nothing to evaluate"),
        (
            lambda c: vars(c.site.container).update(runtime="apptainer", image="docker://torch"),
            "a container has no sbatch",
        ),
        (lambda c: c.evaluation.overrides.update({"optimizer.lr": 1}), "would evaluate something"),
        (lambda c: c.evaluation.overrides.update({"launch.nods": 1}), "did you mean launch.nodes"),
        (lambda c: c.evaluation.overrides.update({"launch.nodes": "x"}), "launch.nodes"),
        (lambda c: c.evaluation.overrides.update({"parallel.tp": 3}), "the job is not possible: "),
        (lambda c: None, "sbatch is not on the PATH"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: Callable[[Config], Any],
    problem: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = config(digits, tmp_path, overrides={})
    change(made)
    with pytest.raises(ConfigError, match=problem):
        check(made, 1)


def stored(folder: Path) -> list[tuple[str, int, float]]:
    with closing(sqlite3.connect(folder / "mlflow.db", timeout=30)) as store:
        asked = "SELECT key, step, value FROM metrics WHERE key LIKE 'val/%' ORDER BY key, step"
        return store.execute(asked).fetchall()


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue", "store")
def test_jobs_evaluate_the_checkpoints_of_a_run(train: Train, tmp_path: Path, paced: Paced) -> None:
    common = ("train.max_steps=40", "train.log_every=20", "monitor.enabled=false", paced.task)
    common += ("precision=fp64",)
    folder = tmp_path / "runs"
    train(
        *("-m", *common, "checkpoint.every_steps=10", "tracking.drain_s=60"),
        *("launch.nodes=2", "evaluation.job=true", "evaluation.overrides={launch.nodes: 1}"),
    )
    (run,) = runs(folder)
    # The first job is cancelled by hand: it leaves no result, and the run submits another one.
    first = run / "evaluations" / "jobs" / "step-00000010" / "asked.json"
    asked = cluster.wait_for(lambda: first.exists() and json.loads(first.read_text()), 180, "a job")
    while asked["job_id"] is None:
        time.sleep(0.1)
        asked = json.loads(first.read_text())
    subprocess.run(["scancel", asked["job_id"]], check=True)
    cluster.wait_for(lambda: f"{asked['job_id']}_0" not in cluster.queue(), 120, "its end")
    cancelled = recorded.read(run, 10) is None
    paced.go()
    cluster.wait_for_end(cluster.job_ids(folder))
    cluster.wait_for(lambda: not cluster.queue(), 300, "the end of the evaluations")
    assert run_json(run)["state"] == "finished"
    # The cancelled one was made up for by the run itself.
    assert json.loads(first.read_text())["tries"] == 1 + cancelled
    # All checkpoints were kept until they were evaluated, though only two are kept otherwise.
    assert recorded.steps(run) == {10, 20, 30, 40}
    run_module("hpctrain", "evaluate", str(run), "--record", "--step", "40")
    # The same training, on one process, with evaluations of its own.
    other = tmp_path / "other"
    train(*common, "train.eval_every=10", "tracking.upload=false", f"output_dir={other}")
    (alone,) = runs(other)
    expected = load_run(alone).metrics
    expected = expected[expected["key"].str.startswith("val/")]
    found = stored(folder)
    assert [(key, step) for key, step, _ in found] == [
        (row.key, row.step)
        for row in expected.sort_values(["key", "step"]).itertuples()
        if row.key != "val/samples_per_s"
    ]
    values = {(row.key, row.step): row.value for row in expected.itertuples()}
    for key, step, value in found:
        assert value == pytest.approx(values[key, step], rel=EXACT)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A stand-in for Slurm, which is not in every place: the scripts that are in its queue."""
    queue: dict[str, str] = {}

    def sbatch(script: Path, config: Config) -> str:
        queue[str(script)] = script.read_text()
        return str(len(queue))

    module = "hpctrain.job.building.evaluation_jobs"
    monkeypatch.setattr(f"{module}.sbatch.sbatch", sbatch)
    running = Job("1_0", "RUNNING", "None", "n1", "N/A")
    monkeypatch.setattr(f"{module}.queued", lambda users: {(path, 0): running for path in queue})
    return queue


def begun(made: Config, *steps: int) -> RunDir:
    """Return a run that has saved checkpoints of these steps."""
    run = RunDir.of(made, "data")
    run.freeze(made)
    for step in steps:
        checkpoint(run, step)
    return run


def checkpoint(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    Manifest(step, 1, {}, {}, 0.0, {}).write(folder)


def test_checkpoints_wait_for_their_results_and_lost_jobs_are_made_up_for(
    scheduler: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    made = config(digits, tmp_path, most_waiting=2)
    run = begun(made, 1, 2, 3)  # by an attempt that was killed before it could ask
    jobs = EvaluationJobs(made, run)
    jobs.finish()
    # Two wait, and the last one in any case; a second look submits nothing twice.
    assert jobs.needed() == {1, 2, 3}
    assert len(scheduler) == 3
    script = next(text for path, text in scheduler.items() if "step-00000002" in path)
    assert 'hpctrain evaluate --record --step 2 "$run"' in script
    recorded.record(run.path, 2, {"val/loss": 1.0}, "xxh3_128:x")
    assert jobs.needed() == {1, 3}
    # The job of step 1 is lost twice; after three jobs without a result it is given up.
    for tries in (2, 3, 3):
        scheduler.pop(str(run.path / "evaluations" / "jobs" / "step-00000001" / "job.sh"), None)
        EvaluationJobs(made, run).finish()
        found = {one.step: one for one in without_result(run.path)}
        assert found[1].tries == tries
    assert found[1].given_up
    assert jobs.needed() == {3}
    checkpoint(run, 4)
    assert [item.path.name[5:] for item in _checkpoints(Facts.read(run.path), 1)] == [
        "00000002",
        "00000001",
    ]
    facts = Facts.read(run.path)
    assert (facts.unevaluated, facts.evaluated) == ([1, 3], {"val/loss": 1.0})


def test_a_job_that_is_ending_at_the_end_of_the_run_is_made_up_for(
    scheduler: dict[str, str], digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows a cancelled job for a while."""
    made = config(digits, tmp_path)
    run = begun(made, 1)
    EvaluationJobs(made, run).finish()
    (script,) = scheduler
    shown = [{(script, 0): Job("1_0", "COMPLETING", "None", "n1", "N/A")}] * 3
    module = "hpctrain.job.building.evaluation_jobs"
    monkeypatch.setattr(f"{module}._LOOK_S", 0.01)
    monkeypatch.setattr(f"{module}.queued", lambda users: shown.pop() if shown else {})
    EvaluationJobs(made, run).finish()
    assert shown == []
    (one,) = without_result(run.path)
    assert one.tries == 2


def test_the_best_checkpoint_follows_from_the_results(
    scheduler: dict[str, str],
    digits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is kept while better ones are awaited, whatever the order in which results come."""
    made = config(digits, tmp_path)
    made.checkpoint.best = "val/accuracy"
    run = begun(made, 1, 2, 3, 4)
    jobs = EvaluationJobs(made, run)
    jobs.finish()
    loaded = load_run(run.path)
    assert loaded.best is None
    for step, value, best in ((3, 0.7, 3), (1, math.nan, 3), (4, 0.9, 4), (2, 0.9, 2)):
        recorded.record(run.path, step, {"val/accuracy": value, "val/loss": 1.0}, "xxh3_128:x")
        assert loaded.best == {"metric": "val/accuracy", "value": max(0.7, value), "step": best}
        assert best in jobs.needed()
        assert state.best(Facts.read(run.path)) == (max(0.7, value), best)
    assert jobs.needed() == {2}  # of equal ones the first
    assert chosen_checkpoint(run, best=True).name == "step-00000002"
    removed = [item.path.name[5:] for item in _checkpoints(Facts.read(run.path), 1)]
    assert removed == ["00000003", "00000001"]
    (row,) = (one for one in look(Facts.read(run.path), verify=False) if "best" in one.kept)
    assert row.path.name == "step-00000002"
    # A branch has the results of its parent, and not its checkpoints.
    shutil.rmtree(run.checkpoints / "step-00000002")
    assert loaded.best == {"metric": "val/accuracy", "value": 0.9, "step": 4}
    # A task of a user may have no such metric, which only its results tell.
    made.checkpoint.best, made.checkpoint.best_mode = "val/nothing", "max"
    EvaluationJobs(made, run).finish()
    assert "checkpoint.best=val/nothing: the evaluations have no such metric" in caplog.text
