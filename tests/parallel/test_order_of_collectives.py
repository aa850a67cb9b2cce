"""Ranks begin their collective operations in one order, as NCCL needs it.

gloo forgives operations of different groups in different orders, where NCCL, whose operations wait
for each other on a GPU, may stand still for ever. So here the ranks are real, and the order is what
torch's flight recorder has of each: any two ranks must have the same one in all groups in which
both are. It does not record what gloo sends from one rank to another.
"""

import itertools
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from hpctrain.engine.faults.collectives import _entries, _recorders
from tests.parallel.parity import Cell, build, either
from tests.ranks import run_ranks

SHARD: dict[str, Any] = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
TWO = {"parallel.dp_replicate": 1, "parallel.dp_shard": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hsdp": ("untied", {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "fsdp, tp": ("untied", TWO | {"parallel.tp": 2}),
    "fsdp, pp": ("untied", TWO | {"parallel.pp": 2, "train.accumulate": 2}),
    "tp, pp": ("untied", {"parallel.tp": 2, "parallel.pp": 2, "train.accumulate": 2}),
    "fsdp, ep": ("moe", SHARD | {"parallel.ep": 2}),
}


class Operation(NamedTuple):
    """An operation that a rank has begun; the ranks of an all_to_all may have different sizes."""

    name: str
    ranks: tuple[int, ...]
    sizes: str


def begun(since_ns: int) -> list[Operation]:
    """Return the operations of this rank since a time."""
    ranks = {
        group.group_name: tuple(ranks)
        for group, ranks in distributed_c10d._world.pg_group_ranks.items()
        if not isinstance(group, int)
    }
    return [
        Operation(
            entry["profiling_name"].partition(":")[2],
            ranks[entry["process_group"][0]],
            "" if "all_to_all" in entry["profiling_name"] else str(entry["input_sizes"]),
        )
        for entry in _entries(_recorders())
        if int(entry["time_created_ns"]) > since_ns
    ]


def trained(model: str, keys: dict[str, Any]) -> list[Operation]:
    since_ns, cell = time.time_ns(), Cell(model, 4, tuple(keys.items()))
    build(cell).run(cell, 2)
    return begun(since_ns)


def disagreement(orders: list[list[Operation]]) -> str:
    """Return where the orders of two ranks part; "" if they never do."""
    for a, b in itertools.combinations(range(len(orders)), 2):
        common = [[each for each in orders[rank] if {a, b} <= {*each.ranks}] for rank in (a, b)]
        for number, (one, other) in enumerate(itertools.zip_longest(*common)):
            if one != other:
                return f"operation {number}: rank {a} begins {one}, rank {b} {other}"
    return ""


@pytest.mark.parametrize("name", either(["fsdp, tp", "tp, pp", "fsdp, ep"], ["hsdp", "fsdp, pp"]))
def test_any_two_ranks_have_one_order(name: str) -> None:
    orders = run_ranks(trained, 4, *LAYOUTS[name])
    assert disagreement(orders) == ""
    for order in orders:
        assert len(order) > 10
        assert len({each.ranks for each in order}) > 1


def crossed() -> list[Operation]:
    since_ns = time.time_ns()
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    mine = groups if distributed.get_rank() else groups[::-1]
    sizes = {id(group): size for size, group in enumerate(groups, 2)}
    works = [
        distributed.all_reduce(torch.ones(sizes[id(group)]), group=group, async_op=True)
        for group in mine
    ]
    for work in works:
        work.wait()
    return begun(since_ns)


def test_an_order_that_differs_is_found() -> None:
    """gloo ends it: two groups of the same ranks, each begun first by one of them."""
    found = disagreement(run_ranks(crossed, 2))
    assert found.startswith("operation 0: rank 0 begins Operation(name='all_reduce', ranks=(0, 1)")
