"""Optimizers of others: which a divided model may have, and killed and resumed trainings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.tensor_reader import Reader
from hpctrain.errors import ConfigError
from hpctrain.job.building import check_optimizer as checked
from tests.bounds import EXACT, within
from tests.conftest import ROOT, hpctrain_on, journal_metrics, only_run
from tests.parallel.parity import Cell, Cells, difference, reference
from tests.steps import ALONE, make
from tests.training import optimizers

OWN = ROOT / "tests" / "training"  # optimizers.py
WHOLE: dict[str, int] = {"dp_replicate": 4, "cp": 2}


@pytest.mark.parametrize(
    ("kind", "layout", "said"),
    [
        (torch.optim.AdamW, {"dp_shard": 2, "tp": 2}, ""),
        (torch.optim.Adafactor, WHOLE, ""),
        (torch.optim.Adafactor, {"dp_shard": 2}, r"\(dp_shard=2\), and it is not known .*=ddp"),
        (optimizers.Lamb, WHOLE, ""),
        (optimizers.Lamb, {"tp": 2, "dp_replicate": 2}, r"\(tp=2\), and it is not known"),
        (optimizers.Prodigy, {"pp": 2}, r"\(pp=2\), and it is not known"),
        (optimizers.Lion, {"ep": 2}, ""),  # it says that it is element-wise
        (optimizers.Around, WHOLE, "its attribute inner is an optimizer with a state of its own"),
        (torch.optim.LBFGS, WHOLE, "needs a closure that computes the loss again"),
    ],
)
def test_what_is_refused_before_the_first_step(
    kind: Any, layout: dict[str, int], said: str
) -> None:
    made = kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1)
    model: Any = SimpleNamespace(layout=layout)
    if not said:
        return checked.check_optimizer("mine", made, model)
    with pytest.raises(ConfigError, match=f"optimizer._target_=mine.*{said}"):
        checked.check_optimizer("mine", made, model)


@pytest.mark.usefixtures("group_of_one")
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    model = make().model
    saved = Checkpointer(tmp_path, 2, ALONE, model, optimizers.Extra(model.parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"state_dict\(\) also has 'slow'"):
        saved.prove()


LAYOUTS = {
    "zero1": {"parallel.dp_replicate": 1, "parallel.dp_shard": 2, "parallel.zero": 1},
    "tp": {"parallel.tp": 2},
}
LISTED = [f"torch.optim.{name}" for name in sorted(checked._ELEMENTWISE["torch"] - {"Muon"})]
TRAINED = [*LISTED, *(f"tests.training.optimizers.{name}" for name in ("Lion", "Early"))]
CELLS = Cells(
    [],
    [
        Cell(
            "conv" if layout == "zero1" else "untied", 2, (*keys.items(),), optimizer=name, steps=3
        )
        for layout, keys in LAYOUTS.items()
        for name in TRAINED
        if (layout, name) != ("tp", "torch.optim.RMSprop")  # rounding: docs/same-numbers.md
    ],
)


@pytest.mark.parametrize("cell", CELLS.params, ids=lambda cell: f"{cell} {cell.optimizer}")
def test_what_is_listed_trains_the_same_where_ranks_divide_the_model(cell: Cell) -> None:
    expected = reference(cell.model, cell.optimizer, 3)
    within([difference(result, expected)[2] for result in CELLS[cell]], EXACT)


SHORT = (
    *("train.max_steps=12", "train.max_epochs=null", "train.eval_every=3", "train.log_every=1"),
    *("checkpoint.every_steps=4", "checkpoint.keep=9", "optimizer.lr=0.05"),
    *("tracking.upload=false", "hooks=[{_target_: optimizers.Kills, at: [6, 10]}]"),
)


def finished(folder: Path, digits: Path, target: str, keys: tuple[str, ...], kills: bool) -> Path:
    """Train to the end, in three attempts if the run is killed twice; return the run directory."""
    folder.mkdir()
    command = (
        *("experiment=digits", f"data.path={digits}", "output_dir=runs", *SHORT),
        *(f"optimizer._target_={target}", *keys),
    )
    for step in () if kills else (6, 10):
        (folder / f"killed-{step}").touch()
    for code in [1, 1, 0] if kills else [0]:
        hpctrain_on(2, *command, code=code, cwd=folder, PYTHONPATH=str(OWN))
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


@pytest.mark.slow  # tests/checkpoint/test_optimizer_state.py has each kind of state
def test_killed_twice_and_resumed_is_the_undisturbed_run_bit_by_bit(
    digits: Path, tmp_path: Path
) -> None:
    keys = ("parallel=zero3", "train.ema=0.9")
    given = digits, "optimizers.ScheduleFree", keys
    killed = finished(tmp_path / "killed", *given, kills=True)
    undisturbed = finished(tmp_path / "undisturbed", *given, kills=False)
    assert journal_metrics(killed) == journal_metrics(undisturbed)
    ours, theirs = tensors(killed), tensors(undisturbed)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        other = theirs[key]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, key
