"""Every strategy gives the losses, gradient norms and parameters of one process."""

from typing import Any

import pytest

from tests.parallel.parity import Cell, Cells, check_equal

Keys = dict[str, Any]
ZERO: dict[int, Keys] = {
    stage: {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": stage}
    for stage in (1, 2, 3)
}
STRATEGIES: dict[str, Keys] = {
    "ddp": {},
    "zero1": ZERO[1],
    "zero2": ZERO[2],
    "zero3": ZERO[3],
    "offload": ZERO[3] | {"parallel.fsdp.offload": True},
}
OF_FOUR: dict[str, Keys] = {
    "hsdp": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2},
    "hsdp, zero1": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.zero": 1},
    "hsdp, zero2": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.zero": 2},
    "zero3, parameters over 2": ZERO[3] | {"parallel.fsdp.reshard_after_forward": 2},
}
# Options of a strategy, and options that save memory. One model trains with them, accumulating.
OPTIONS: dict[str, Keys] = {
    "ddp, reduced every time": {"parallel.sync": "every"},
    "ddp, other options": {
        "parallel.ddp.bucket_mb": 0.01,
        "parallel.ddp.find_unused_parameters": True,
    },
    "zero2, offload": ZERO[2] | {"parallel.fsdp.offload": True},
    "zero3, reduced last": ZERO[3] | {"parallel.sync": "last"},
    "ddp, checkpointing": {"train.activation_checkpointing": "full"},
    "zero3, checkpointing": ZERO[3] | {"train.activation_checkpointing": "full"},
    "zero3, selective": ZERO[3] | {"train.activation_checkpointing": "selective"},
}
# Without those that are near to another one; the slow tests have all of them.
NEAR = ("zero2, offload", "ddp, checkpointing", "hsdp, zero1", "hsdp, zero2")
BRIEF = {name: keys for name, keys in OPTIONS.items() if name not in NEAR}

# The models and the numbers of micro-batches. `make test` has the first pair with each strategy,
# and the last one with one strategy of each wrapper.
PAIRS = [("transformer", 2), ("transformer", 1), ("conv", 2), ("conv", 1)]


def cells(strategies: dict[str, Keys], ranks: int, pairs: list[tuple[str, int]]) -> list[Cell]:
    return [
        Cell(model, ranks, (*keys.items(), ("train.accumulate", accumulate)))
        for model, accumulate in pairs
        for keys in strategies.values()
    ]


# Four ranks are for what two cannot do.
CELLS = [
    *cells(STRATEGIES | BRIEF, 2, [("transformer", 2)]),
    *cells({name: STRATEGIES[name] for name in ("ddp", "zero3")}, 2, [("conv", 1)]),
    *cells({n: keys for n, keys in OF_FOUR.items() if n not in NEAR}, 4, [("transformer", 2)]),
]
SLOW = [
    cell
    for cell in [
        *cells(STRATEGIES, 2, PAIRS),
        *cells(OPTIONS, 2, [("transformer", 2)]),
        *cells(STRATEGIES | OF_FOUR, 4, PAIRS),
    ]
    if cell not in CELLS
]


# The weights of all tokens of a step add up to 0.23: the layouts that divide by it by other roads.
PIPELINE: Keys = {"parallel.pp": 2, "parallel.dp_replicate": 1, "train.accumulate": 2}
TP: Keys = {"parallel.tp": 2, "parallel.dp_replicate": 1}
CELLS += cells({"zero3": ZERO[3]}, 2, [("untied, light", 2)])
CELLS += [Cell("untied, light", 2, tuple(PIPELINE.items()))]
SLOW += cells({"ddp": {}, "zero1": ZERO[1], "zero2": ZERO[2], "tp": TP}, 2, [("untied, light", 1)])
SLOW += cells(OF_FOUR, 4, [("untied, light", 2)])
# Compression that leaves nothing out is no compression.
WHOLE: Keys = {"train.compression.kind": "powersgd", "train.compression.rank": 1000}
CELLS += cells({"ddp": WHOLE}, 2, [("transformer", 2)])


ALL = Cells(CELLS, SLOW)


@pytest.mark.parametrize("cell", ALL.params, ids=str)
def test_equal_to_one_process(cell: Cell) -> None:
    check_equal(cell, ALL[cell])
