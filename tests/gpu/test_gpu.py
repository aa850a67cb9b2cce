"""A training on a GPU, the same training on the CPU, and checkpoints that go from one to the other.

Generators of CUDA and of the CPU give other numbers. So both trainings start from one checkpoint.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed, journal_metrics, run_json, runs
from tests.gpu.device import DEVICE, on_device

pytestmark = on_device

STEPS = 20
SHORT = (
    *(f"train.max_steps={STEPS}", "train.log_every=1", "tracking.upload=false"),
    *("checkpoint.every_steps=1", f"checkpoint.keep={STEPS}"),
)
Train = Callable[..., Completed]


@pytest.fixture
def train_on(train: Train) -> Callable[..., Path]:
    """A function that trains on a device, in a folder, and returns the run directory."""

    def call(device: str, folder: Path, *arguments: str) -> Path:
        given = (*SHORT, f"parallel.device={device}", f"output_dir={folder}", *arguments)
        train(*given, new=True)  # a fork may not use CUDA if its parent has asked for GPUs
        (run,) = runs(folder)
        assert run_json(run)["state"] == "finished"
        return run

    return call


def without_later_steps(run: Path, step: int, folder: Path) -> Path:
    """Copy a run into another folder as if it had been stopped after `step`; return the folder."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    kept = f"step-{step:08d}"
    for checkpoint in copy.glob("checkpoints/step-*"):
        if checkpoint.name > kept:
            shutil.rmtree(checkpoint)
    assert (copy / "checkpoints" / kept).is_dir()
    (copy / "run.json").write_text(json.dumps(run_json(copy) | {"state": "interrupted"}))
    return folder


def losses(run: Path, first: int = 1) -> dict[tuple[str, int], float]:
    """Return the losses from a step on, of training and evaluation, by name and step."""
    metrics = journal_metrics(run)
    found = {key: value for key, value in metrics.items() if key[0].endswith("loss")}
    return {key: value for key, value in found.items() if key[1] >= first}


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
def test_the_gpu_gives_the_losses_of_the_cpu(
    train_on: Callable[..., Path], tmp_path: Path, compute: str, tolerance: float
) -> None:
    precision = f"precision.compute={compute}"
    whole = train_on("cpu", tmp_path / "cpu", precision)
    begun = without_later_steps(whole, 1, tmp_path / "gpu")
    resumed = train_on(DEVICE.type, begun, precision)
    assert run_json(resumed)["attempts"][-1]["first_step"] == 1
    expected = losses(whole, first=2)
    assert len(expected) >= STEPS - 1
    assert expected["train/loss", STEPS] < 0.8 * expected["train/loss", 2], "it must learn"
    assert losses(resumed, first=2) == pytest.approx(expected, rel=tolerance)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(
    train_on: Callable[..., Path], tmp_path: Path
) -> None:
    whole = train_on(DEVICE.type, tmp_path / "gpu")
    resumed = train_on("cpu", without_later_steps(whole, STEPS // 2, tmp_path / "cpu"))
    assert run_json(resumed)["attempts"][-1]["first_step"] == STEPS // 2
    after = STEPS // 2 + 1
    assert losses(resumed, after) == pytest.approx(losses(whole, after), rel=1e-3)


def test_a_resumed_training_with_dropout_is_the_undisturbed_one(
    train_on: Callable[..., Path], tmp_path: Path
) -> None:
    """Dropout needs the state of CUDA's generator; another one would change every loss."""
    dropout = "model.dropout=0.3"
    whole = train_on(DEVICE.type, tmp_path / "whole", dropout)
    begun = without_later_steps(whole, STEPS // 2, tmp_path / "resumed")
    resumed = train_on(DEVICE.type, begun, dropout)
    assert run_json(resumed)["attempts"][-1]["first_step"] == STEPS // 2
    after = STEPS // 2 + 1
    assert losses(resumed, after) == pytest.approx(losses(whole, after), rel=1e-6)
    plain = train_on(DEVICE.type, tmp_path / "plain")
    assert losses(plain, after) != pytest.approx(losses(whole, after), rel=1e-3), "no dropout"
