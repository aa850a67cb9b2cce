"""Speeds of a rank by itself, of all ranks together, and of pairs of nodes.

A rank: matrix products, memory, and the link to its GPU. A CPU may have other work at the same
time, also on a node that is well, so its figures are shown and not compared.

All ranks: an all-reduce, with the formulas of nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):

    algorithm bandwidth = bytes / time                       of the tensor of one rank
    bus bandwidth       = algorithm bandwidth x 2(n - 1)/n   the speed of the links, for any n

Pairs of nodes exchange data, to find the node whose link is slow. In each round every node has
another partner, as in a tournament: with n nodes, each pair has met after n - 1 rounds.
`hpctrain.insight.doctor.comparison.links` judges the result.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from hpctrain.cluster.ranks.ranks import RankInfo

_SIZE = {"cpu": 512, "cuda": 8192}  # of a matrix
# Bytes that are copied, that are reduced, and that are sent.
_MEMORY = {"cpu": 2**25, "cuda": 2**30}
_REDUCED = {"cpu": 2**23, "cuda": 2**28}
_SENT = {"cpu": 2**21, "cuda": 2**26}
_REPEATS, _SECONDS = 5, 0.4  # on a busy CPU, a short time can be that of others alone
_MOST_ROUNDS = 15  # of more than 16 nodes, each still meets 15 others


def of_rank(device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of a matrix product, GB/s of memory, and on a GPU GB/s from the host to it.

    A GPU multiplies bfloat16, a CPU float32. Each figure is that of the fastest repeat.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, fastest = _SIZE[device.type], partial(_fastest, device, seconds=_SECONDS)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    figures = {"matmul_tflops": 2 * size**3 / fastest(lambda: torch.mm(a, b, out=out)) / 1e12}
    source = torch.zeros(_MEMORY[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads each byte and writes it.
    figures["memory_gb_s"] = 2 * source.numel() / fastest(lambda: target.copy_(source)) / 1e9
    if device.type == "cuda":
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        place = target[: host.numel()]
        seconds = fastest(lambda: place.copy_(host, non_blocking=True))
        figures["to_gpu_gb_s"] = host.numel() / seconds / 1e9
    return figures


def of_all_reduce(device: torch.device, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return the latency of 4 bytes, and the bus bandwidth of a large tensor.

    All ranks of the group call it; None is the default group.
    """

    def seconds(size: int) -> float:
        """Return the fastest of some repeats, of the slowest rank."""
        tensor = torch.zeros(size // 4, device=device)
        reduce = partial(dist.all_reduce, tensor, group=group)
        best = _fastest(device, reduce, before=partial(dist.barrier, group=group))
        slowest = torch.tensor([best], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return float(slowest)

    large, count = _REDUCED[device.type], dist.get_world_size(group)
    return {"latency_us": 1e6 * seconds(4), "bus_gb_s": bus_bandwidth(large, seconds(large), count)}


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in 1e9 bytes per second."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def of_pairs(device: torch.device, ranks: RankInfo) -> dict[int, float]:
    """Exchange data between the first ranks of the nodes; all ranks call it.

    A first rank gets the number of each node that it has met, with 1e6 bytes per second in one
    direction; both directions are busy.
    """
    found: dict[int, float] = {}
    for pairs in islice(rounds(ranks.num_nodes), _MOST_ROUNDS):
        partner = next((a + b - ranks.node_rank for a, b in pairs if ranks.node_rank in (a, b)), -1)
        dist.barrier()
        if ranks.local_rank == 0 and partner >= 0:
            # Every node has the same number of ranks, so this is the first one of the partner.
            found[partner] = _exchange(device, partner * ranks.local_world_size)
    dist.barrier()
    return found


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round of a tournament of `count` players (the circle method)."""
    players = [*range(count), *([-1] if count % 2 else [])]
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if -1 not in (a, b)]
        players.insert(1, players.pop())


def _exchange(device: torch.device, partner: int) -> float:
    size = _SENT[device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        both = dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)
        for each in dist.batch_isend_irecv([*both]):
            each.wait()

    return size / _fastest(device, exchange) / 1e6


def _fastest(
    device: torch.device,
    work: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
    seconds: float = 0.0,
) -> float:
    """Return the seconds of the fastest repeat, after one that connects and is not measured.

    There are five, and more until so many `seconds` are over; `before` each comes a call.
    """
    work()
    best, number, end = float("inf"), 0, time.perf_counter() + seconds
    while number < _REPEATS or time.perf_counter() < end:
        before()
        synchronise(device)
        begin = time.perf_counter()
        work()
        synchronise(device)
        best, number = min(best, time.perf_counter() - begin), number + 1
    return best


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
