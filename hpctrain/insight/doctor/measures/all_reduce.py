"""Speed of all-reduce, with the formulas of nccl-tests.

algorithm bandwidth = bytes / time                       of the tensor of one rank
bus bandwidth       = algorithm bandwidth x 2(n - 1)/n   the speed of the links, for any n

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import time

import torch
import torch.distributed as dist

_LARGE = {"cpu": 2**23, "cuda": 2**28}  # bytes
_REPEATS = 5


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in 1e9 bytes per second."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def measured(device: torch.device, group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Measure the latency of 4 bytes, and the bus bandwidth of a large tensor.

    All ranks of the group call it; None is the default group.
    """
    large, count = _LARGE[device.type], dist.get_world_size(group)
    return {
        "latency_us": 1e6 * _seconds(4, device, group),
        "bus_gb_s": bus_bandwidth(large, _seconds(large, device, group), count),
    }


def _seconds(size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the fastest of some repeats, of the slowest rank."""
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
    return float(slowest)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
