"""Each strategy loads the checkpoints of all others and goes on with the same losses."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bounds import EXACT, within
from tests.parallel.parity import (
    BEFORE,
    Cell,
    Result,
    difference,
    gone_on,
    reference,
    rest_of,
    resumed,
    save,
    saved,
    whole,
)
from tests.ranks import run_ranks

Made = Callable[..., Path]
STEPS = 5
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
# Pipelines cannot have tied embeddings, so these train another model.
UNTIED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": STRATEGIES["zero3"],
    "tp, zero3": STRATEGIES["tp, zero3"],
    "cp": (2, {"parallel.cp": 2}),
    "pp, tp": (4, {"parallel.pp": 2, "parallel.tp": 2, "train.accumulate": 2}),
}


def cell(name: str, model: str = "transformer") -> Cell:
    ranks, keys = (STRATEGIES if model == "transformer" else UNTIED)[name]
    return Cell(model, ranks, tuple(keys.items()), "adamw", STEPS)


def resume(cell: Cell, folders: list[Path]) -> list[Result]:
    return [resumed(cell, folder) for folder in folders]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function that returns a strategy's checkpoint, after the same steps as all others."""

    @functools.cache
    def folder(name: str, model: str = "transformer") -> Path:
        found = tmp_path_factory.mktemp(name)
        run_ranks(save, cell(name, model).ranks, cell(name, model), found)
        return found

    return folder


def test_a_checkpoint_of_another_strategy_goes_on(made: Made) -> None:
    check(cell("tp, zero3"), [made("hsdp")])


@pytest.mark.slow
@pytest.mark.parametrize("to", STRATEGIES)
def test_any_checkpoint_goes_on(to: str, made: Made) -> None:
    check(cell(to), [made(name) for name in STRATEGIES])


@pytest.mark.slow
@pytest.mark.parametrize("to", UNTIED)
def test_degrees_that_divide_the_model_load_any_checkpoint(to: str, made: Made) -> None:
    check(cell(to, "untied"), [made(name, "untied") for name in UNTIED])


def check(to: Cell, folders: list[Path]) -> None:
    rest = rest_of(reference(to.model, "adamw", STEPS))
    by_rank = run_ranks(resume, to.ranks, to, folders, timeout=480)
    for result in itertools.chain(*by_rank):
        within(difference(result, rest), EXACT)


def interrupted(keys: dict[str, Any], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the parameters and buffers of this rank, undisturbed and resumed from the middle."""
    ends = []
    cell = Cell("conv, batch norm", 2, tuple(keys.items()), steps=BEFORE + 2)
    for again in (False, True):
        if again:
            training = gone_on(cell, folder)
        else:
            training = saved(cell, folder)
            training.run(cell, 2)
        ends.append(whole(training.model) | dict(training.model.module.named_buffers()))
    return ends


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_statistics_of_a_batch_norm_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    for undisturbed, again in run_ranks(interrupted, 2, STRATEGIES[name][1], tmp_path):
        assert any("running_mean" in key for key in undisturbed)
        for key, value in undisturbed.items():
            assert torch.equal(again[key], value), key
