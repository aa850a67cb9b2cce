"""A step makes as many collective operations as the textbooks say."""

import functools
from collections import Counter as Counts
from typing import Any

import pytest
from torch.distributed.tensor.debug import CommDebugMode

from tests.parallel.parity import Cell, build
from tests.ranks import run_ranks
from tests.steps import Watched

LAYERS, GROUPS = 4, 5  # of the model "untied"; what is outside of its layers is a group, too
STEP = 2  # the sums of the step, the norm of the gradient
SHARD: dict[str, Any] = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
TWICE = {"train.accumulate": 2}
# gather, scatter and reduce (all-gather, reduce-scatter, all-reduce) of a step on two ranks
EXPECTED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    # Rajbhandari et al. 2020. Stage 1 gathers and scatters once in a step.
    "zero1, 2 micro-batches": (SHARD | TWICE | {"parallel.zero": 1}, GROUPS, GROUPS, STEP),
    # Stage 2 scatters after each micro-batch.
    "zero2, 2 micro-batches": (SHARD | TWICE | {"parallel.zero": 2}, GROUPS, 2 * GROUPS, STEP),
    # Stage 3 gathers in each pass; what is outside of the layers stays between the passes.
    "zero3": (SHARD, 2 * GROUPS - 1, GROUPS, STEP),
    "zero3, 2 micro-batches": (SHARD | TWICE, 2 * (2 * GROUPS - 1), 2 * GROUPS, STEP),
    # Korthikanti et al. 2022: each layer gathers and scatters twice in each pass. The embedding
    # scatters, and the head gathers; in the backward pass it is the other way round. The loss
    # reduces a maximum, a sum of exponentials and the logit of the target; the gradients of the
    # norms are reduced together.
    "tp": ({"parallel.tp": 2}, 4 * LAYERS + 2, 4 * LAYERS + 2, 3 + 1 + STEP),
    # Shoeybi et al. 2019: each layer adds up twice in each pass.
    "tp without sequence parallel": (
        {"parallel.tp": 2, "parallel.sequence_parallel": False},
        *(0, 0, 4 * LAYERS + 2 + 3 + STEP),
    ),
    # Grattafiori et al. 2024, section 3.3.2: keys and values are gathered once in each layer. The
    # gradients of the replicas are reduced.
    "cp": ({"parallel.cp": 2}, LAYERS, LAYERS, GROUPS + STEP),
}


def counted(keys: dict[str, Any]) -> dict[str, int]:
    """Return the collective operations of the second step, by kind; the first makes groups."""
    cell = Cell("untied", 2, tuple(keys.items()))
    training = build(cell)
    training.run(cell, 1)
    found: dict[Any, int] = Counts[Any]()

    def see(func: Any, _: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            found[func.name()] += 1

    if "train.accumulate" in keys:  # then torch's CommDebugMode fails; ours sees no divided loss
        with Watched(see):
            training.run(cell, 1)
    else:
        with CommDebugMode() as mode:
            training.run(cell, 1)
        found = mode.get_comm_counts()
    kinds: Counts[str] = Counts()
    for operation, count in found.items():
        name = str(operation).replace("_", "")
        kinds[next((k for k in ("gather", "scatter", "wait", "reduce") if k in name), name)] += (
            count
        )
    del kinds["wait"]
    return dict(kinds)


def counted_all() -> dict[str, dict[str, int]]:
    return {name: counted(keys) for name, (keys, *_) in EXPECTED.items()}


@functools.cache
def by_rank() -> list[dict[str, dict[str, int]]]:
    return run_ranks(counted_all, 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_as_in_the_textbook(name: str) -> None:
    _, gather, scatter, reduce = EXPECTED[name]
    expected = {"gather": gather, "scatter": scatter, "reduce": reduce}
    for found in by_rank():
        assert found[name] == {kind: count for kind, count in expected.items() if count}
