"""A checkpoint that a writer makes in the background is the one that the trainer would make."""

import os
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.files.manifest import Manifest, checkpoints, damage
from hpctrain.checkpoint.tensor_reader import Reader
from hpctrain.training.step import TrainStep
from tests.ranks import run_ranks
from tests.steps import batch, here, make, weights

pytestmark = pytest.mark.usefixtures("group_of_one")
ROOM = 1 << 30


def checkpointer(folder: Path, step: TrainStep) -> Checkpointer:
    """Return what saves a step; its writers are started, as small as the state is."""
    made = Checkpointer(folder, 2, here(), step.model, step.optimizer)
    made.saves.start_writers(ROOM)
    step.saving = made.saves.agreement
    return made


def go_on(step: TrainStep, saved: Checkpointer, number: int = 0) -> None:
    """Train until the save under way is committed."""
    while saved.saves.is_under_way:
        step(batch(8, number), 1e-2)
        saved.saves.advance()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    step = make(dropout=0.5)
    step(batch(8), 1e-2)
    (tmp_path / "a").mkdir()
    saved = checkpointer(tmp_path / "a" / "checkpoints", step)
    progress = {"step": 1, "metrics": {"x": 1.5}}
    random = torch.get_rng_state()
    assert saved.save(1, progress)
    torch.set_rng_state(random)
    os.rename(saved.path(1), tmp_path / "waited")
    assert saved.save(1, progress, background=True)
    progress["metrics"]["x"] = 2.0
    before = weights(step)
    go_on(step, saved)
    assert not torch.equal(weights(step), before), "the training went on"
    assert contents(saved.path(1)) == contents(tmp_path / "waited") != {}
    assert not damage(saved.path(1))
    found, other = Manifest.read(saved.path(1)), Manifest.read(tmp_path / "waited")
    assert found.progress == other.progress == {"step": 1, "metrics": {"x": 1.5}}
    assert [each.step for each in saved.saves.committed] == [1, 1]
    saved.saves.close()
