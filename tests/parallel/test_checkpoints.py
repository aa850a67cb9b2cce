"""Each strategy loads the checkpoints of all others and goes on with the same losses."""

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.distributed.ranks import RankInfo
from tests.parallel.parity import Cell, Result, Training, build, difference, reference, whole
from tests.ranks import run_ranks

Saved = Callable[..., Path]
BEFORE, AFTER = 2, 3
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "zero1": (2, {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": 1}),
    "zero3": (4, {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}),
    "hsdp": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "offload": (
        2,
        {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.fsdp.offload": True},
    ),
    "tp": (2, {"parallel.tp": 2}),
    "tp, zero3": (4, {"parallel.tp": 2, "parallel.dp_replicate": 1, "parallel.dp_shard": 2}),
}
NAMES = list(STRATEGIES)
# Each strategy loads the checkpoint of the one 3 places before it. The slow tests load all.
COVERING = {name: NAMES[i - 3] for i, name in enumerate(NAMES)}


# Pipelines cannot have tied embeddings, so these train another model.
UNTIED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": STRATEGIES["zero3"],
    "tp, zero3": STRATEGIES["tp, zero3"],
    "cp": (2, {"parallel.cp": 2}),
    "pp, tp": (4, {"parallel.pp": 2, "parallel.tp": 2, "train.accumulate": 2}),
}


def cell(name: str, model: str = "transformer") -> Cell:
    ranks, keys = (STRATEGIES if model == "transformer" else UNTIED)[name]
    return Cell(model, ranks, tuple(keys.items()), "adamw", BEFORE + AFTER)


def checkpointer(training: Training, folder: Path) -> Checkpointer:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ranks = RankInfo("test", rank, rank, 0, size, size, 1, "localhost", 1)
    return Checkpointer(folder, 2, ranks, training.model, training.step.optimizer)


def save(cell: Cell, folder: Path) -> None:
    training = build(cell)
    training.run(cell, BEFORE)
    checkpointer(training, folder).save(BEFORE, {"step": BEFORE})


def resume(cell: Cell, folders: list[Path]) -> list[Result]:
    return [resume_one(cell, folder) for folder in folders]


def resume_one(cell: Cell, folder: Path) -> Result:
    training = build(cell)
    assert checkpointer(training, folder).load_latest() == {"step": BEFORE}
    training.seen = BEFORE
    training.run(cell, AFTER)
    return Result(training.losses, training.norms, whole(training.model))


def only_fast(names: Iterable[str], *fast: str) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in fast else slow) for name in names]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A function that returns a strategy's checkpoint, after the same steps as all others."""

    @functools.cache
    def folder(name: str, model: str = "transformer") -> Path:
        made, found = cell(name, model), tmp_path_factory.mktemp(name)
        run_ranks(save, made.ranks, made, found)
        return found

    return folder


@pytest.mark.parametrize("to", only_fast(STRATEGIES, "zero3", "tp, zero3"))
def test_a_checkpoint_of_another_strategy_goes_on(to: str, saved: Saved) -> None:
    check(cell(to), [saved(COVERING[to])])


@pytest.mark.slow
@pytest.mark.parametrize("to", STRATEGIES)
def test_any_checkpoint_goes_on(to: str, saved: Saved) -> None:
    check(cell(to), [saved(name) for name in STRATEGIES])


@pytest.mark.parametrize("to", only_fast(UNTIED))
def test_degrees_that_divide_the_model_load_each_other(to: str, saved: Saved) -> None:
    names = list(UNTIED)
    check(cell(to, "untied"), [saved(names[names.index(to) - 1], "untied")])


@pytest.mark.slow
@pytest.mark.parametrize("to", UNTIED)
def test_degrees_that_divide_the_model_load_any_checkpoint(to: str, saved: Saved) -> None:
    check(cell(to, "untied"), [saved(name, "untied") for name in UNTIED])


def check(to: Cell, folders: list[Path]) -> None:
    expected = reference(to.model, "adamw", BEFORE + AFTER)
    rest = Result(expected.losses[BEFORE:], expected.norms[BEFORE:], expected.parameters)
    by_rank = run_ranks(resume, to.ranks, to, folders)
    for result in itertools.chain(*by_rank):
        losses, norms, parameters = difference(result, rest)
        assert max(losses, norms) < 1e-5
        assert parameters < 1e-4  # Adam divides by the root of tiny second moments


def interrupted(keys: dict[str, Any], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the parameters and buffers of this rank, undisturbed and resumed from the middle."""
    ends = []
    for resumed in (False, True):
        made = Cell("conv, batch norm", 2, tuple(keys.items()))
        training = build(made)
        saved = checkpointer(training, folder)
        if resumed:
            assert saved.load_latest() == {"step": 2}
            training.seen = 2
        else:
            training.run(made, 2)
            saved.save(2, {"step": 2})
        training.run(made, 2)
        ends.append(whole(training.model) | dict(training.model.module.named_buffers()))
    return ends


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_statistics_of_a_batch_norm_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    for undisturbed, resumed in run_ranks(interrupted, 2, STRATEGIES[name][1], tmp_path):
        assert any("running_mean" in key for key in undisturbed)
        for key, value in undisturbed.items():
            assert torch.equal(resumed[key], value), key
