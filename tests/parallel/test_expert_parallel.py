"""A transformer with experts gives the results of one process, with and without expert parallel."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from hpctrain.config.rules.combinations import division_problems, parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.config.schema.parallel import PipelineConfig
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan
from hpctrain.errors import ConfigError
from tests.bounds import EXACT, within
from tests.parallel.parity import (
    MODELS,
    Cell,
    Cells,
    Result,
    Training,
    build,
    config,
    difference,
    either,
    gone_on,
    rest_of,
    save,
    whole,
)
from tests.ranks import run_ranks
from tests.steps import Watched

ZERO3: dict[str, Any] = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
HSDP = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
EP = {"parallel.ep": 2}
PARTS = {"train.accumulate": 2}
TP = {"parallel.tp": 2}
CP = {"parallel.cp": 2}
PP = {"parallel.pp": 2}
AGAIN = {"train.activation_checkpointing": "full"}


def cell(ranks: int, *keys: dict[str, Any], model: str = "moe") -> Cell:
    return Cell(model, ranks, tuple(item for given in keys for item in given.items()))


COVERING = [
    cell(1, PARTS, AGAIN),
    cell(2, PARTS),
    cell(2, EP),
    cell(2, ZERO3, EP, PARTS, AGAIN),
    cell(2, TP, PARTS, AGAIN),
    cell(2, PP, PARTS),
    cell(2, CP, EP),
]
MORE = [
    cell(2, ZERO3, AGAIN),
    cell(4, ZERO3, EP, PARTS, AGAIN),
    cell(4, HSDP, PARTS),
    cell(4, HSDP, EP),
    cell(1, {"train.compile": "blocks"}),
    cell(2, ZERO3, EP, {"parallel.zero": 1}, PARTS),
    cell(2, ZERO3, EP, {"parallel.fsdp.offload": True}, PARTS),
    cell(2, ZERO3, {"train.activation_checkpointing": "selective"}),
    cell(4, EP, PARTS),
    cell(4, EP, {"parallel.sync": "every"}, PARTS),
    cell(4, ZERO3, EP, {"parallel.zero": 2}, PARTS),
    cell(4, ZERO3, {"parallel.ep": 4}, PARTS),
    cell(4, ZERO3, EP, {"parallel.fsdp.reshard_after_forward": 2}),
    cell(4, {"parallel.ep": 4}, AGAIN),
    cell(2, TP, {"parallel.loss_parallel": False}),
    cell(4, TP, PARTS),
    cell(4, TP, ZERO3, PARTS),
    cell(2, CP),
    cell(4, CP, ZERO3, EP, PARTS),
    cell(2, PP, PARTS, AGAIN, {"parallel.pipeline.schedule": "gpipe"}),
    cell(4, PP, EP, PARTS),
    cell(4, PP, ZERO3, EP, PARTS),
    cell(4, PP, TP, PARTS),
]


class Seen(NamedTuple):
    """What a rank has seen: results, metrics, the biases of all experts, its number of experts."""

    result: Result
    means: dict[str, float]
    balance: dict[str, torch.Tensor]
    experts: int


def train(cells: tuple[Cell, ...]) -> list[Seen]:
    found = []
    for cell in cells:
        training = build(cell)
        training.run(cell, cell.steps)
        found.append(seen(training))
    return found


def seen(training: Training) -> Seen:
    module = training.model.module
    balance = {name.removeprefix("module."): buffer for name, buffer in module.named_buffers()}
    bank = next(p for name, p in module.named_parameters() if name.endswith("bank.up"))
    experts = len(bank.to_local() if isinstance(bank, DTensor) else bank)
    result = Result(training.losses, training.norms, whole(training.model))
    return Seen(result, training.means, balance, experts)


@functools.cache
def alone(model: str) -> Seen:
    (answer,) = run_ranks(train, 1, (Cell(model, 1),))
    found: Seen = answer[0]
    return found


def trained(cells: tuple[Cell, ...]) -> dict[Cell, list[Seen]]:
    answers = run_ranks(train, cells[0].ranks, cells, timeout=800)
    return {cell: [answer[i] for answer in answers] for i, cell in enumerate(cells)}


CELLS = Cells(COVERING, MORE, trained)


def check(cell: Cell, by_rank: list[Seen]) -> None:
    expected = alone(cell.model)
    for rank in by_rank:
        within(difference(rank.result, expected.result), EXACT)
        check_balance(rank, expected)
        assert rank.means["expert_load_max"] == expected.means["expert_load_max"]
        if dict(cell.keys).get("parallel.ep"):
            assert rank.experts == 4 // dict(cell.keys)["parallel.ep"]
    assert min(expected.result.norms) > 0.2, "clipping must bite"
    assert min(float(b.abs().max()) for b in expected.balance.values()) >= 0.002, "it must move"
    assert 1 < expected.means["expert_load_max"] < 4


def check_balance(rank: Seen, expected: Seen) -> None:
    assert rank.balance
    for name, bias in rank.balance.items():  # a rank has those of its stage of a pipeline
        assert torch.equal(bias, expected.balance[name])


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_equal_to_one_process(cell: Cell) -> None:
    check(cell, CELLS[cell])


def exchanges(cell: Cell) -> int:
    training, found = build(cell), list[str]()
    with Watched(lambda func, _: found.append(str(func))):
        training.run(cell, 1)
    return sum("alltoall" in name for name in found)


@pytest.mark.parametrize(("keys", "passes"), [({}, 5), (AGAIN, 8)], ids=["once", "again"])
def test_exchanges_are_those_of_the_textbook(keys: dict[str, Any], passes: int) -> None:
    """Tokens travel there and back in each pass, and in each forward pass their numbers, too."""
    layers, parts = 2, 2
    found = run_ranks(exchanges, 2, cell(2, ZERO3, EP, PARTS, keys))
    assert found == [layers * parts * passes] * 2


def resume(cell: Cell, folders: list[Path]) -> list[Seen]:
    return [seen(gone_on(cell, folder)) for folder in folders]


@pytest.mark.parametrize(
    "cells",
    either([[cell(1), cell(2, ZERO3, EP)]], [[cell(2, EP), cell(1), cell(4, ZERO3, EP)]]),
    ids=["some", "more"],
)
def test_checkpoints_load_with_any_number_of_expert_ranks(
    cells: list[Cell], tmp_path: Path
) -> None:
    folders = [tmp_path / str(i) for i in range(len(cells))]
    for made, folder in zip(cells, folders, strict=True):
        run_ranks(save, made.ranks, made, folder)
    undisturbed = alone("moe")
    expected = rest_of(undisturbed.result)
    for made in cells:
        for rank in run_ranks(resume, made.ranks, made, folders):
            for found in rank:
                within(difference(found.result, expected), EXACT)
                check_balance(found, undisturbed)


@pytest.mark.parametrize(
    ("degrees", "ep", "message"),
    [
        (Degrees(8), 3, "parallel.ep=3 does not divide dp_replicate 8: use 2 or 4"),
        (Degrees(4, 2), 4, "parallel.ep=4 does not divide dp_shard 2: use 2"),
    ],
)
def test_ranks_that_cannot_be_divided(degrees: Degrees, ep: int, message: str) -> None:
    config = Config()
    config.parallel.ep = ep
    assert list(parallel_problems(config, degrees)) == [message]


@pytest.mark.parametrize(
    ("degrees", "ep", "message"),
    [
        (Degrees(8), 8, "parallel.ep=8 does not divide model.experts=4: use 4"),
        (Degrees(1, 6), 3, "parallel.ep=3 does not divide model.experts=4: use 2 or 4"),
        (Degrees(2, tp=2), 2, "model.experts=4 with parallel.ep=2 and tp 2: data-parallel ranks"),
    ],
)
def test_refused_before_and_after_the_model_is_built(
    degrees: Degrees, ep: int, message: str
) -> None:
    config = Config()
    config.parallel.ep = ep
    config.model = {"_target_": "hpctrain.models.Transformer", "experts": 4}
    (problem, *_) = division_problems(config, degrees)
    assert problem.startswith(message)
    built = message.replace("model.experts", "layers.1.mlp.bank")
    with pytest.raises(ConfigError, match=re.escape(built)):
        find_plan(MODELS["moe"](), config.parallel, degrees)


def test_the_backward_pass_is_in_one_piece() -> None:
    parallel = ParallelConfig(pipeline=PipelineConfig(schedule="zbv"))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline\.schedule=zbv: use gpipe, 1f1b or"):
        find_plan(MODELS["moe"](), parallel, Degrees(pp=2))


def test_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match=r"parallel.ep=2: Transformer has no experts; hpctrain"):
        find_plan(MODELS["untied"](), ParallelConfig(ep=2), Degrees(2))


@pytest.mark.parametrize(
    "given",
    [{"train.compression.kind": "powersgd"}, {"train.activation_checkpointing": "selective"}],
)
def test_what_does_not_go_with_it(given: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=f"{next(iter(given))}=.* with parallel.ep=2"):
        config(cell(2, EP, given))
