"""Ranks with different shares of the samples give the results of one process."""

from typing import Any

import numpy as np
import pytest

from hpctrain.config.job_request import size_problems
from hpctrain.data.loading.steps import Steps
from tests.parallel.parity import Cell, Cells, check_equal
from tests.steps import config_with

ZERO1 = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": 1}


def cell(weights: tuple[int, ...], ranks: int, keys: dict[str, Any] | None = None) -> Cell:
    given = {"parallel.weights": weights} | (keys or {})
    return Cell("transformer", ranks, tuple(given.items()))


COVERING = [
    cell((2, 1, 1), 3),
    cell((1, 3), 4, {"parallel.ddp.bucket_mb": 0.01}),
    cell((1, 3), 4, ZERO1 | {"parallel.dp_replicate": 2}),
]
MORE = [
    cell((3, 1), 2, {"train.accumulate": 2}),
    cell((1, 7), 2, {"train.micro_batch_size": "1"}),
    cell((3, 1), 2, ZERO1 | {"train.accumulate": 2}),
    cell((2, 1, 1), 3, ZERO1),
    cell((1, 3), 2, {"train.activation_checkpointing": "full"}),
]


CELLS = Cells(COVERING, MORE)


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_equal_to_one_process(cell: Cell) -> None:
    check_equal(cell, CELLS[cell])


def test_shares_of_the_samples() -> None:
    places = [(0, 2), (2, 1), (3, 1)]
    taken = []
    for first, count in places:
        steps = Steps(22, 8, dp_rank=first, dp_size=4, dp_count=count, tail="pad", max_epochs=1)
        assert steps.share == 2 * count
        (stretch, tail) = steps.stretches(0)
        taken.append(np.concatenate([np.stack(steps.positions(s)) for s in (stretch, tail)], 1))
    positions, mask = np.concatenate(taken, 2)
    assert (positions == np.minimum(np.arange(24).reshape(3, 8), 21)).all()
    assert (mask == (np.arange(24).reshape(3, 8) < 22)).all()


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        ({"launch.nodes": 3}, 3, "parallel.weights=[2, 1]: 2 numbers, but the job has 3 nodes"),
        ({}, 3, "parallel.weights=[2, 1]: 2 nodes cannot have the same number of 3 ranks"),
        ({"train.global_batch_size": 64}, 2, "=64 is not divisible by 3 shares of parallel.weigh"),
        ({"train.global_batch_size": 64}, 4, "train.accumulate 1 = 6: use 60 or 66"),
        ({"parallel.tp": 2}, 4, "=2: use only dp_replicate and dp_shard"),
        ({"parallel.dp_shard": 2}, 2, "those with fewer would not answer; use parallel.dp_shard=1"),
        ({"parallel.sync": "every"}, 2, "parallel.zero=1 and parallel.sync=auto"),
        ({"train.local_sgd.every": 2}, 2, "with train.local_sgd.every=2: give one of them"),
        ({"parallel.fsdp.agree": True}, 2, "with parallel.fsdp.agree=true: give one of them"),
        ({"parallel.ep": 2}, 2, "with parallel.ep=2: give one of them"),
        ({"data.collate": "pack"}, 2, "with data.collate=pack: give one of them"),
    ],
)
def test_what_does_not_fit(keys: dict[str, Any], ranks: int, message: str) -> None:
    config = config_with({"parallel.weights": [2, 1]} | keys)
    assert message in "\n".join(size_problems(config, ranks))
