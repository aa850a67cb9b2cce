"""Histograms of every layout are those of one process, and count what is not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.tracking.tracker import NullTracker
from hpctrain.training.measuring.histograms import (
    HIGHEST,
    LOWEST,
    Histograms,
    _readable,
    _row,
    picture,
)
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, build, either
from tests.parallel.test_features import LAYOUTS
from tests.ranks import run_ranks

STEPS = 2
CELLS = {
    name: Cell(model, ranks, tuple(keys.items()), "features")
    for name, (model, ranks, keys) in LAYOUTS.items()
} | {
    "fields, zero3": Cell(
        "fields, unet", 2, (("parallel.dp_replicate", 1), ("parallel.dp_shard", 2))
    )
}


def histograms(cell: Cell, folder: Path) -> None:
    """Train, and record the histograms of the last step."""
    training = build(cell)
    training.step.histograms = Histograms(STEPS, folder, NullTracker())
    training.run(cell, STEPS)


def recorded(cell: Cell, folder: Path) -> dict[str, Any]:
    run_ranks(histograms, cell.ranks, cell, folder)
    (file,) = folder.glob("artifacts/histograms/*.json")
    assert file.name == f"step-{STEPS:08d}.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def counts(row: dict[str, Any]) -> list[int]:
    return [*row["negative"][::-1], row["zero"], *row["positive"], row["nonfinite"]]


@pytest.mark.parametrize("name", either(["pp"], [name for name in CELLS if name != "pp"]))
def test_equal_to_one_process(name: str, tmp_path: Path) -> None:
    """A value at the border of two bins may be in the other one, for it is equal but for rounding.

    The replicas of local SGD have gradients of their own, whose mean is not that of one process.
    """
    cell = CELLS[name]
    keys = (("train.clip_norm", None),) if name == "local sgd" else ()
    expected = recorded(Cell(cell.model, 1, keys, cell.optimizer), tmp_path / "alone")
    found = recorded(cell, tmp_path / "spread")
    for kind in ("gradients", "weights")[name == "local sgd" :]:
        assert found[kind].keys() == expected[kind].keys()
        for parameter, row in found[kind].items():
            ours, theirs = counts(row), counts(expected[kind][parameter])
            assert sum(ours) == sum(theirs), parameter
            moved = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            assert moved <= max(2, 2e-3 * sum(ours)), (kind, parameter, moved)
            of_one = expected[kind][parameter]
            scale = abs(of_one["mean"]) + of_one["std"] + 1e-12
            for figure in ("mean", "std"):
                within([abs(row[figure] - of_one[figure]) / scale], EXACT)


def test_each_value_has_its_bin() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, 1.5, -2.0, 2.0**-60, -1e30, torch.nan, -torch.inf, 0.25])
    row = _readable(_row(values, 2.0).tolist())
    # The factor 2 makes 1.0 a 2.0, which is in the bin from 2 to 4: that of the power 2.
    at = {n + LOWEST: count for n, count in enumerate(row["positive"]) if count}
    assert at == {2: 2, LOWEST: 1, 0: 1}
    assert {n + LOWEST: c for n, c in enumerate(row["negative"]) if c} == {3: 1, HIGHEST: 1}
    assert (row["zero"], row["nonfinite"]) == (2, 2)
    assert row["mean"] == pytest.approx(-2e30 / 8)
    halves = torch.full((7,), 0.5, dtype=torch.bfloat16)
    assert _readable(_row(halves, 1.0).tolist())["positive"][-LOWEST] == 7
    assert sum(counts(_readable(_row(torch.ones(3, dtype=torch.complex64), 1.0).tolist()))) == 6


def test_a_picture_of_many_parameters_has_a_row_for_each_module() -> None:
    row = _readable(_row(torch.tensor([0.5, torch.nan]), 1.0).tolist())
    rows = {f"layers.{i}.{j}.weight": row for i in range(30) for j in range(4)}
    axes = picture(rows, "gradients, step 3", LOWEST).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"layers.{i} (4 not finite)" for i in range(30)]
    assert axes.get_title() == "gradients, step 3"
