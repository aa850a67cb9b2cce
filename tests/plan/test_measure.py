"""`plan --measure`: the best layouts are trained for some steps, and compared."""

import io
import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.terminal.console import Console
from hpctrain.cluster.slurm import sbatch
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import load
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.insight.estimates.measured_run import MeasuredRun
from hpctrain.insight.estimates.memory_fit import Fit
from hpctrain.insight.plan import measurement
from hpctrain.insight.plan.answer import Query, answer
from hpctrain.insight.plan.measurement import STEPS, Measured, chosen, minutes, short_run
from hpctrain.insight.plan.plan_command import main, planned_of, whole
from hpctrain.insight.plan.predicting.estimator import Estimate
from hpctrain.insight.plan.predicting.timing import StepTime
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry
from hpctrain.launch.freeze import check
from hpctrain.launch.sweeps import wait
from tests import cluster
from tests.conftest import run_json

# A hook of a user, which ends the second layout as a GPU without enough memory would.
FULL = """\
import sys
import torch
from hpctrain.training import Hook

class Full(Hook):
    def after_step(self, state):
        if "/1-" in sys.argv[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""
_TIME = StepTime(1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.1)


@pytest.fixture
def with_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is submitted in these tests."""
    monkeypatch.setattr(sbatch, "available", lambda: True)


def estimates(composer: Composer, digits: Path, output: Path, *words: str) -> list[Estimate]:
    where = [f"data.path={digits}", f"output_dir={output}", "train.max_steps=200"]
    training = planned_of(composer.typed(["experiment=digits", *where, *words]))
    return answer(Query(training, None, None, None, None, True, measure=True), []).layouts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.path=null"], "--measure with data.path=null: measuring trains some steps, so it"),
        (["--sample-shape", "64"], "--measure with --sample-shape=64: measuring trains some"),
        (["launch.dry_run=true"], "--measure with launch.dry_run=true: it submits jobs"),
        ([], "--measure submits jobs, but sbatch is not on the PATH: call it on a login node"),
    ],
)
def test_what_cannot_be_measured(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HpctrainError) as caught:
        main(["experiment=digits", f"output_dir={tmp_path}/runs", "--measure", *words])
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("with_sbatch")
def test_a_layout_that_does_not_fit_is_not_submitted(digits: Path, tmp_path: Path) -> None:
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    small = ["hardware=h100_sxm", "hardware.memory_gib=0.001", "parallel=ddp", "--measure"]
    with pytest.raises(ConfigError, match=r"the layout of the command line \(single\) does not f"):
        main([*where, *small])
    with pytest.raises(ConfigError, match="--measure: no layout fits on these nodes"):
        main([*where, *small[:2], "--measure"])
    assert not (tmp_path / "runs").exists()


def test_the_jobs_of_one_number_of_ranks_are_one_array_and_only_measure(
    composer: Composer, digits: Path, tmp_path: Path
) -> None:
    words = ["launch.tasks_per_node=2", "+scaling=weak", "scheduler.warmup_steps=90"]
    words += ["train.early_stopping.metric=val/loss", "checkpoint.best=val/loss"]
    words += ["train.batch_size_ramp=[{global_batch_size: 32, steps: 9}]", "train.profile=10-12"]
    found = estimates(composer, digits, tmp_path, *words)
    (group,) = chosen(found)
    assert group == found[:3]
    assert [one.layout.kind for one in group] == ["ddp", "zero1", "zero2"]
    entries = []
    given = composer.typed(["experiment=digits", f"data.path={digits}", *words])
    for one in group:
        config = short_run(one, tmp_path, minutes(group), partial(whole, given))
        validate(config)
        entries.append(Entry([], config, check(config)))
    assert len(arrays.plan(entries, tmp_path, 1000)) == 1
    first, original = entries[0].config, found[0].layout.training
    assert (first.train.max_steps, first.data.val_split) == (STEPS, None)
    assert (first.checkpoint.at_end, first.tracking.upload) == (False, False)
    assert first.launch.wait
    assert (original.train.max_steps, original.data.val_split) == (200, "val")
    # A prediction makes the limit shorter, so that the jobs start soon.
    assert minutes(group) == original.launch.time_min == 60
    time = replace(_TIME, step_s=2.0)
    timed = [replace(one, time=time) for one in group]
    assert minutes(timed) == (600 + 3 * STEPS * 2 + original.launch.warn_s) / 60 + 0.5
    bad = replace(timed[0], fit=Fit(False))
    two = replace(timed[1], layout=replace(timed[1].layout, nodes=2))
    assert chosen([bad, two, *timed, timed[0]]) == [[two], timed]


def test_measured_beside_predicted(composer: Composer, digits: Path, tmp_path: Path) -> None:
    found = estimates(composer, digits, tmp_path, "launch.tasks_per_node=2")
    slow, fast, failed, other = found[:4]
    run = tmp_path / "0-ddp"
    measured = (20, 0.5, 0.5, None, None, 1.0, 0.0, 0.0, None)
    own = MeasuredRun(run, 2, None, *measured)
    slow = replace(slow, time=replace(_TIME, step_s=1.1 * own.step_s))
    results = [
        Measured(failed, tmp_path / "2-zero2", None, "OutOfMemoryError: CUDA out of memory"),
        Measured(slow, run, replace(own, peak_bytes=5 * slow.memory.total // 4)),
        Measured(fast, run, replace(own, step_s=own.step_s / 2)),
    ]
    every = [slow, fast, failed, other]
    facts: dict[str, Any] = {"layouts": [one.as_json() for one in every]}
    measurement.compare(facts, every, results, ["+launch.nodes=7", "data.path=a b"])
    first, second, third, fourth = facts["layouts"]
    assert first["measured"]["step_error"] == pytest.approx(0.1)
    assert first["measured"]["peak_error"] == pytest.approx(-0.2, abs=1e-3)
    assert second["measured"]["samples_per_s"] == 2 * first["measured"]["samples_per_s"] == 256
    assert (third["measured"], third["note"]) == (None, results[0].cause)
    assert fourth["measured"] is fourth["run"] is None
    (best,) = facts["fastest"]
    assert best["overrides"] == [*fast.layout.overrides]
    command = "python -m hpctrain -m 'data.path=a b' "  # and no key twice
    assert best["command"] == command + shlex.join(fast.layout.overrides)
    text = io.StringIO()
    console = Console()
    console.file = text
    measurement.show(console, facts)
    rows = [line.split()[:2] for line in text.getvalue().splitlines()]
    places = [rows.index(start) for start in (["zero1", "2"], ["ddp,", "as"], ["zero2", "*"])]
    assert places == sorted(places), "the fastest first, one that has failed last"
    assert f"OutOfMemoryError: CUDA out of memory; python -m hpctrain logs {tmp_path}" in str(
        text.getvalue()
    )
    measurement.compare(facts, every, results[:1], [])
    assert facts["fastest"] == []


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.usefixtures("empty_queue")
def test_ctrl_c_cancels_the_jobs(
    capsys: pytest.CaptureFixture[str],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(*given: object) -> None:
        assert len(cluster.queue()) == 2
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wait, "wait", pressed)
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    assert main([*where, "+site.sbatch.hold=true", "--measure"]) == 130
    cluster.wait_for(lambda: not cluster.queue(), 60, "an empty queue")
    assert "cancelled " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_the_best_layouts_on_a_cluster(
    capsys: pytest.CaptureFixture[str],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "of_a_user.py").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "runs"
    words = ["experiment=digits", f"data.path={digits}", f"output_dir={output}"]
    words += ["launch.tasks_per_node=2", "hooks=[{_target_: of_a_user.Full}]"]
    assert main([*words, "--measure", "--json"]) == 0
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out)
    first, second, third, *others = found["layouts"]
    assert [each["ranks"] for each in (first, second, third)] == [2, 2, 2]
    assert first["measured"]["steps"] == third["measured"]["steps"] == 20
    assert first["measured"]["step_s"] > 0
    assert second["measured"] is None
    assert "out of memory" in second["note"]
    assert all(each["measured"] is None and each["note"] for each in others)
    best = min(first, third, key=lambda each: float(each["measured"]["step_s"]))
    (fastest,) = found["fastest"]
    assert fastest["overrides"] == best["overrides"]
    assert fastest["command"].startswith("python -m hpctrain -m experiment=digits ")
    # One array, no checkpoint, no upload.
    measured = [Path(each["run"]) for each in (first, third)]
    jobs = [run_json(run)["attempts"][0]["job_id"].split("_") for run in measured]
    assert jobs == [[jobs[0][0], "0"], [jobs[0][0], "2"]]
    assert all(not list((run / "checkpoints").glob("step-*")) for run in measured)
    assert not load(measured[0] / "config.yaml").tracking.upload
    assert measured[0].parent.parent == output / "measure"
    assert "3 of 3 runs have ended" in said.err
