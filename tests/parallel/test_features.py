"""What a training has beside its steps gives the numbers of one process in every layout.

One training has all of it: groups of parameters, layer-wise decay and frozen parameters.
"""

import functools
from typing import Any

import pytest

from tests.parallel.parity import STEPS, TOLERANCE, Cell, Result, difference, reference, results

Keys = dict[str, Any]
SHARD: Keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
PP: Keys = {"parallel.pp": 2, "parallel.dp_replicate": 1, "train.accumulate": 4}
LAYOUTS: dict[str, tuple[str, int, Keys]] = {
    "ddp": ("untied", 2, {"train.accumulate": 2}),
    "zero1": ("untied", 2, SHARD | {"parallel.zero": 1, "train.accumulate": 2}),
    "zero2": ("untied", 2, SHARD | {"parallel.zero": 2, "train.accumulate": 2}),
    "zero3": ("untied", 2, SHARD),
    "zero3, tied": ("transformer", 2, SHARD),
    "offload": ("untied", 2, SHARD | {"parallel.fsdp.offload": True}),
    "local sgd": ("untied", 2, {"train.local_sgd.every": 1, "train.clip_norm": None}),
    "tp": ("untied", 2, {"parallel.tp": 2}),
    "tp, tied": ("transformer", 2, {"parallel.tp": 2}),
    "pp": ("untied", 2, PP),
    "cp": ("untied", 2, {"parallel.cp": 2}),
    "ep": ("moe", 2, {"parallel.ep": 2}),
    "hsdp": ("untied", 4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "tp, zero3": ("untied", 4, {"parallel.tp": 2} | SHARD),
    "pp, tp": ("untied", 4, PP | {"parallel.tp": 2}),
}
FAST = ("ddp", "zero1", "zero3", "tp, tied", "pp", "cp", "ep", "hsdp")


def cell(name: str) -> Cell:
    model, ranks, keys = LAYOUTS[name]
    return Cell(model, ranks, tuple(keys.items()), "features")


@functools.cache
def trained(ranks: int, slow: bool) -> dict[Cell, list[Result]]:
    names = [name for name in LAYOUTS if LAYOUTS[name][1] == ranks and (name in FAST) != slow]
    return results(tuple(map(cell, names)))


@pytest.mark.parametrize(
    "name",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS],
)
def test_equal_to_one_process(name: str) -> None:
    made = cell(name)
    expected = reference(made.model, "features")
    if name == "local sgd":  # whose reference does not clip, and whose norms are those of replicas
        unclipped = Cell(made.model, 1, made.keys[-1:], "features")
        (expected,) = results((unclipped,))[unclipped]
    for result in trained(made.ranks, name not in FAST)[made]:
        losses, norms, parameters = difference(result, expected)
        norms = 0.0 if name == "local sgd" else norms
        assert len(result.losses) == STEPS
        assert max(losses, norms, parameters) < TOLERANCE
