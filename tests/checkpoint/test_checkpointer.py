"""Checkpoints are loaded bit by bit, and a damaged or unfinished one is not loaded."""

import logging
import os
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.checkpointer import Checkpointer, verify
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import StorageError
from hpctrain.train.step import TrainStep
from tests.ranks import run_ranks
from tests.steps import ALONE, batch, make, weights

pytestmark = pytest.mark.usefixtures("group_of_one")


def checkpointer(folder: Path, step: TrainStep) -> Checkpointer:
    return Checkpointer(folder, 2, ALONE, step.model, step.optimizer)


def test_saved_and_loaded_twice_goes_on_the_same(tmp_path: Path) -> None:
    """It is resumed twice, because a second resume was wrong in torch (pytorch #138575)."""
    step = make(dropout=0.5)
    saved = checkpointer(tmp_path, step)
    for number in range(1, 7):
        if number in (3, 5):
            saved.save(number, {"step": number})
            torch.manual_seed(number)  # the checkpoint must restore the random state
            step = make(dropout=0.5)
            saved = checkpointer(tmp_path, step)
            assert saved.load_latest() == {"step": number}
        step(batch(16, number), 1e-2)
    torch.manual_seed(0)
    undisturbed = make(dropout=0.5)
    for number in range(1, 7):
        undisturbed(batch(16, number), 1e-2)
    assert torch.equal(weights(step), weights(undisturbed))


def test_only_the_newest_stay_and_an_unfinished_one_is_none(tmp_path: Path) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path, step)
    assert saved.load_latest() is None
    for number in (1, 2, 3):
        saved.save(number, {"step": number})
    (tmp_path / "step-00000009.tmp").mkdir()
    assert sorted(path.name for path in tmp_path.glob("step-????????")) == [
        "step-00000002",
        "step-00000003",
    ]
    assert saved.load_latest() == {"step": 3}


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path, step)
    for number in (1, 2):
        saved.save(number, {"step": number})
    newest = tmp_path / "step-00000002"
    (data,) = newest.glob("*.distcp")
    content = bytearray(data.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "truncated":
        os.truncate(data, len(content) - 1)
    elif damage == "missing":
        data.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    assert verify(newest)
    with caplog.at_level(logging.WARNING):
        assert saved.load_latest() == {"step": 1}
    assert "step-00000002 is not intact" in caplog.text
    # The step can be saved again, in place of the damaged checkpoint.
    saved.save(2, {"step": 2})
    assert saved.load_latest() == {"step": 2}
    for path in tmp_path.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(StorageError, match="no checkpoint is intact"):
        saved.load_latest()


def test_a_checkpoint_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    step = make()
    step(batch(8), 1e-2)
    folder = tmp_path / "checkpoints"
    saved = checkpointer(folder, step)
    folder.write_text("not a folder")
    with pytest.raises(StorageError, match="the checkpoint was not written"):
        saved.save(1, {})


def saved_and_loaded(folder: Path) -> tuple[bool, dict[str, int] | None, float, float]:
    """Save on all ranks of a group, change what was saved, and load it."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    step = make(dropout=0.5)
    place = RankInfo("test", rank, rank, 0, count, count, 1, "localhost", 1)
    saved = Checkpointer(folder, 2, place, step.model, step.optimizer)
    step(batch(8), 1e-2)
    before = weights(step)
    torch.manual_seed(rank)  # each rank has random numbers of its own
    saved.save(1, {"step": 1})
    drawn = torch.rand(1).item()
    step(batch(8), 1e-2)
    progress = saved.load_latest()
    return torch.equal(weights(step), before), progress, drawn, torch.rand(1).item()


def loaded(folder: Path) -> dict[str, int] | None:
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = RankInfo("test", rank, rank, 0, count, count, 1, "localhost", 1)
    step = make(dropout=0.5)
    return Checkpointer(folder, 2, place, step.model, step.optimizer).load_latest()


def test_two_ranks_save_one_checkpoint_and_each_has_its_random_state(tmp_path: Path) -> None:
    first, second = run_ranks(saved_and_loaded, 2, tmp_path)
    for same, progress, drawn, again in (first, second):
        assert (same, progress) == (True, {"step": 1})
        assert drawn == again
    assert first[2] != second[2]
    assert run_ranks(loaded, 2, tmp_path) == [{"step": 1}] * 2
    # No rank loads the unfinished save of a killed job.
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.tmp")
    assert run_ranks(loaded, 2, tmp_path) == [None] * 2
