"""Speed of all-reduce by size, with the formulas of nccl-tests.

algorithm bandwidth = bytes / time                       of the tensor of one rank
bus bandwidth       = algorithm bandwidth x 2(n - 1)/n   the speed of the links, for any n

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_SIZES = {"cpu": (4, 2**16, 2**20, 2**23), "cuda": (4, 2**16, 2**20, 2**24, 2**28)}
_REPEATS = 5


@dataclass(frozen=True)
class Row:
    """The speed of one size in bytes: the fastest of some repeats, of the slowest rank."""

    size: int
    seconds: float
    bus_gb_s: float


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in 1e9 bytes per second."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def measured(device: torch.device, group: dist.ProcessGroup | None = None) -> list[Row]:
    """Measure all-reduce; all ranks of the group call it, None is the default group.

    There is a row for each size, from 4 bytes, whose time is the latency.
    """
    count, rows = dist.get_world_size(group), []
    for size in _SIZES[device.type]:
        tensor = torch.zeros(size // 4, device=device)
        dist.all_reduce(tensor, group=group)  # connects
        best = float("inf")
        for _ in range(_REPEATS):
            dist.barrier(group=group)
            synchronise(device)
            begin = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            synchronise(device)
            best = min(best, time.perf_counter() - begin)
        slowest = torch.tensor([best], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        seconds = float(slowest)
        rows.append(Row(size, seconds, bus_bandwidth(size, seconds, count)))
    return rows


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
