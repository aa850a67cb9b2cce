"""Pairs of nodes exchange data, to find the node whose link is slow.

In each round every node has another partner, as in a tournament: with n nodes, each pair has met
after n - 1 rounds. `hpctrain.insight.doctor.comparison.links` judges the result.
"""

import time
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.insight.doctor.measures.all_reduce import synchronise

_BYTES = {"cpu": 2**21, "cuda": 2**26}
_REPEATS = 5
_MOST_ROUNDS = 15  # of more than 16 nodes, each still meets 15 others


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round of a tournament of `count` players (the circle method)."""
    players = [*range(count), *([-1] if count % 2 else [])]
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if -1 not in (a, b)]
        players.insert(1, players.pop())


def measured(device: torch.device, ranks: RankInfo) -> dict[int, float]:
    """Exchange data between the first ranks of the nodes; all ranks call it.

    A first rank gets the number of each node that it has met, with 1e6 bytes per second in one
    direction; both directions are busy.
    """
    speeds: dict[int, float] = {}
    for pairs in islice(rounds(ranks.num_nodes), _MOST_ROUNDS):
        partner = next((a + b - ranks.node_rank for a, b in pairs if ranks.node_rank in (a, b)), -1)
        dist.barrier()
        if ranks.local_rank == 0 and partner >= 0:
            # Every node has the same number of ranks, so this is the first one of the partner.
            speeds[partner] = _exchange(device, partner * ranks.local_world_size)
    dist.barrier()
    return speeds


def _exchange(device: torch.device, partner: int) -> float:
    size = _BYTES[device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(_REPEATS):
        synchronise(device)
        begin = time.perf_counter()
        work = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        )
        for each in work:
            each.wait()
        synchronise(device)
        best = min(best, time.perf_counter() - begin)
    return size / best / 1e6
