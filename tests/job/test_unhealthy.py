"""Runs with a sample that is NaN, with parameters that overflow, and with an evaluation of NaN."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.runs.checkpoints.manifest import Manifest, checkpoints, newest_healthy
from tests.conftest import Completed, journal_metrics, only_run, run_json, run_module, runs, shared
from tests.made_runs import status_json

SAMPLES = 128  # of a step
STEPS = 12  # an epoch has as many steps, so every sample is trained on once


@pytest.fixture(scope="session")
def broken(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as float32 in several shards, with one NaN in one of the training samples."""

    def make(folder: Path) -> None:
        shards = [h5py.File(path) for path in sorted(digits.glob("*.h5"))]
        images = np.concatenate([shard["image"][:] for shard in shards]).astype("float32")
        images[700, 0, 3, 4] = np.nan
        source = folder.with_suffix(".npz")
        labels = np.concatenate([shard["label"][:] for shard in shards])
        np.savez(source, image=images, label=labels)
        for shard in shards:
            shard.close()
        command = ["arrays", str(source), str(folder), "--split", "train=0.8,val=0.2"]
        run_module("data_prep", *command, "--shard-size", "128KB")

    return shared(tmp_path_factory, "broken", make)


Train = Callable[..., Completed]


def nan_sample(data: Path) -> list[str | int]:
    """Return the shard and the row of the sample with the NaN."""
    for shard in sorted(data.glob("train*.h5")):
        with h5py.File(shard) as file:
            rows = np.isnan(file["image"][:]).any(axis=(1, 2, 3)).nonzero()[0]
        if len(rows):
            return [str(shard), int(rows[0])]
    raise AssertionError("it is not a training sample")


@pytest.fixture
def train_on(train: Train, broken: Path) -> Train:
    """A function that trains on these digits, in tmp_path/runs."""
    size = (f"train.global_batch_size={SAMPLES}", "data.tail=pad", f"train.max_steps={STEPS}")
    often = (*size, "checkpoint.every_steps=1", "train.log_every=1")
    return partial(train, f"data.path={broken}", "tracking.upload=false", *often)


def test_a_run_stops_names_the_samples_and_resumes(
    train_on: Train, broken: Path, tmp_path: Path
) -> None:
    done = train_on(code=8)
    run = only_run(tmp_path)
    record = run_json(run)
    (listed,) = (run / "nonfinite").iterdir()
    facts = json.loads(listed.read_text())
    (rank,) = facts["ranks"]
    step = facts["step"]
    assert record["state"] == "failed"
    error = record["attempts"][-1]["error"]
    assert error.startswith(f"loss is not finite since step {step} (first on rank 0, ")
    assert error in " ".join(done.stderr.split())
    assert rank["samples"].count(nan_sample(broken)) == 1
    assert len(rank["samples"]) == SAMPLES
    sample = nan_sample(broken)
    (wrong,) = rank["not_finite"]
    assert wrong == {"field": "image", "sample": sample, "values": 1}
    name = "{} row {}".format(*sample)
    assert f"; not finite in the batch: image of {name} (" in error
    (row,) = status_json(tmp_path / "runs")
    assert "loss is not finite since step" in row["reason"]
    newest = newest_healthy(run / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{step - 1:08d}"
    # The run goes on from there without the batch.
    train_on("train.nonfinite=skip")  # the policy does not change the name of the run
    record = run_json(run)
    assert record["state"] == "finished"
    assert record["attempts"][-1]["first_step"] == step - 1
    metrics = journal_metrics(run)
    assert ("train/loss", step) not in metrics, "no mean of a step that was left out"
    assert metrics["train/skipped_steps", STEPS] == 1
    assert all(np.isfinite(value) for name, value in metrics.items() if name[1] != step)
    assert record["result"]["val/accuracy"] > 0.3
    assert record.get("notes", []) == []


def test_rollback_leaves_the_batch_out(train_on: Train, tmp_path: Path) -> None:
    done = train_on("train.nonfinite=rollback", "checkpoint.every_steps=4")
    run = only_run(tmp_path)
    record = run_json(run)
    assert record["state"] == "finished"
    assert len(record["attempts"]) == 1
    ((step, consumed),) = record["left_out"]
    assert consumed == SAMPLES * step
    assert "the run goes back to its newest healthy checkpoint" in done.stderr
    metrics = journal_metrics(run)
    losses = {at: value for (name, at), value in metrics.items() if name == "train/loss"}
    assert list(losses) == [*range(1, STEPS + 1)]
    assert all(map(np.isfinite, metrics.values()))
    # The batches after it move up by one; the number of samples says so.
    last = Manifest.read(checkpoints(run / "checkpoints")[0])
    assert last.progress["data"]["consumed"] > SAMPLES * STEPS
    # Without a checkpoint the run begins at step 0 again, and is the same.
    other = ["train.nonfinite=rollback", "checkpoint.every_steps=1000", f"output_dir={tmp_path}/2"]
    train_on(*other)
    (again,) = runs(tmp_path / "2")
    assert run_json(again)["result"]["train/loss"] == record["result"]["train/loss"]


def test_a_training_that_diverges_uses_up_the_budget(train: Train, tmp_path: Path) -> None:
    """The command of a user: the learning rate is absurd, and every later step is not finite."""
    often = ["train.max_epochs=3", "train.clip_norm=null", "tracking.enabled=false"]
    train("optimizer.lr=1e18", *often, code=8)
    run = only_run(tmp_path)
    error = run_json(run)["attempts"][-1]["error"]
    assert error.startswith("loss is not finite since step 2 (")
    assert "; all fields of the batch are finite; its samples: " in error
    assert newest_healthy(run / "checkpoints") is None
    done = train("optimizer.lr=1e18", *often, "train.nonfinite=skip", code=8)
    assert "has left out 10 steps within 1000 steps already" in done.stderr


def test_parameters_that_are_nan_after_the_last_update(train: Train, tmp_path: Path) -> None:
    """Loss and gradient of the only step are finite; AdamW without eps divides 0 by 0."""
    once = ["train.max_steps=1", "tracking.enabled=false"]
    done = train("+optimizer.options.eps=0", *once, code=8)
    assert "weight is not finite since step 1" in done.stderr
    run = only_run(tmp_path)
    assert run_json(run)["state"] == "failed"
    (checkpoint,) = checkpoints(run / "checkpoints")
    assert not Manifest.read(checkpoint).healthy


def test_an_evaluation_that_is_not_finite_is_said(
    train_on: Train, broken: Path, tmp_path: Path
) -> None:
    done = train_on("data.train_split=val", "data.val_split=train", "train.max_steps=2")
    assert "not finite: val/loss=nan" in done.stderr
    assert "val/loss is nan" in done.stdout
    run = only_run(tmp_path)
    assert "val/loss is nan" in run_json(run)["attempts"][-1]["reason"]
    assert torch.isnan(torch.tensor(run_json(run)["result"]["val/loss"]))
