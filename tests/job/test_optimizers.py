"""Trainings with optimizers of others: killed and resumed, and refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.tensor_reader import Reader
from tests.conftest import ROOT, hpctrain_on, journal_metrics, only_run

OWN = ROOT / "tests" / "training"  # optimizers.py
SHORT = (
    *("train.max_steps=12", "train.max_epochs=null", "train.eval_every=3", "train.log_every=1"),
    *(
        "checkpoint.every_steps=4",
        "checkpoint.keep=9",
        "optimizer.lr=0.05",
        "tracking.upload=false",
    ),
    "hooks=[{_target_: optimizers.Kills, at: [6, 10]}]",
)


def finished(folder: Path, digits: Path, target: str, keys: tuple[str, ...], kills: bool) -> Path:
    """Train to the end, in three attempts if the run is killed twice; return the run directory."""
    folder.mkdir()
    command = (
        *("experiment=digits", f"data.path={digits}", "output_dir=runs", *SHORT),
        *(f"optimizer._target_={target}", *[key for key in keys if key != "parallel=ddp"]),
    )
    codes = [1 if keys else -9] * 2 + [0] if kills else [0]
    for step in () if kills else (6, 10):
        (folder / f"killed-{step}").touch()
    for code in codes:
        hpctrain_on(2 if keys else 1, *command, code=code, cwd=folder, PYTHONPATH=str(OWN))
    return only_run(folder)


def tensors(run: Path) -> dict[str, Any]:
    """Return all that the last checkpoint has, also the random states."""
    reader = Reader(run / "checkpoints" / "step-00000012")
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if hasattr(entry, "size")
        else None
        for key, entry in reader.saved.items()
    }
    reader.load(state, no_dist=True)
    return state


@pytest.mark.slow  # the parts of it are tested in tests/checkpoint
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ScheduleFree", ()),
        ("ScheduleFree", ("parallel=ddp",)),
        ("ScheduleFree", ("parallel=zero3", "train.ema=0.9")),
        ("Early", ("parallel=zero3",)),
        ("Nested", ("parallel=zero1",)),
        ("RowWise", ("parallel=zero3",)),
        ("Prodigy", ("parallel=ddp",)),
    ],
)
def test_killed_twice_and_resumed_is_the_undisturbed_run_bit_by_bit(
    name: str, keys: tuple[str, ...], digits: Path, tmp_path: Path
) -> None:
    target = f"optimizers.{name}"
    killed = finished(tmp_path / "killed", digits, target, keys, kills=True)
    undisturbed = finished(tmp_path / "undisturbed", digits, target, keys, kills=False)
    assert journal_metrics(killed) == journal_metrics(undisturbed)
    ours, theirs = tensors(killed), tensors(undisturbed)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        other = theirs[key]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, key
