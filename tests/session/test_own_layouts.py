"""A loop of one's own computes the same in every layout, with the same global batch."""

from pathlib import Path

import pytest
import torch

from tests.conftest import journal_metrics, run_json, runs
from tests.session import runs_of_own

LAYOUTS = {
    "ddp": ("parallel.dp_replicate=2",),
    "zero1": ("parallel.dp_shard=2", "parallel.zero=1"),
    "zero3": ("parallel.dp_shard=2", "parallel.zero=3"),
}
GIVEN = (
    *("train.max_steps=12", "train.log_every=1", "precision=fp64", "checkpoint.best=val/val"),
    "data.val_sets=[{name: first, split: train}]",
)


@pytest.fixture(scope="module")
def alone(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    runs_of_own.started(digits, folder)("pair", *GIVEN)
    (run,) = runs(folder)
    return run


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1")), "zero3"]
)
def test_two_ranks_compute_what_one_process_does(
    layout: str, digits: Path, tmp_path: Path, alone: Path
) -> None:
    runs_of_own.started(digits, tmp_path)("pair", *GIVEN, *LAYOUTS[layout], ranks=2)
    (run,) = runs(tmp_path)
    ours, expected = journal_metrics(run), journal_metrics(alone)
    assert ours.keys() == expected.keys()
    assert {("val/first_rows", 3), ("val/val_rows", 11), ("train/rows", 12)} < ours.keys()
    assert (ours["val/val_rows", 3], ours["val/first_rows", 3]) == (382, 1415)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-9)
    mine, theirs = runs_of_own.tensors(run), runs_of_own.tensors(alone)
    names = [name for name in theirs if name.startswith(("model.", "optimizer."))]
    assert {name.split(".")[1] for name in names} == {"coder", "judge", "first", "second"}
    for name in names:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-9, msg=name)
    assert run_json(run)["best"]["step"] == run_json(alone)["best"]["step"]
