"""Speed of one rank by itself: matrix products, memory, and the link to its GPU.

A CPU may have other work at the same time, also on a node that is well, so its figures are shown
and not compared.
"""

import time
from collections.abc import Callable

import torch

from hpctrain.insight.doctor.measures.all_reduce import synchronise

_SIZE = {"cpu": 512, "cuda": 8192}
_MEMORY = {"cpu": 2**25, "cuda": 2**30}
_REPEATS, _SECONDS = 5, 0.4  # on a busy CPU, a short time can be that of others alone


def measured(device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of a matrix product, GB/s of memory, and on a GPU GB/s from the host to it.

    A GPU multiplies bfloat16, a CPU float32. Each figure is that of the fastest repeat.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = _SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    figures = {"matmul_tflops": 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), device) / 1e12}
    source = torch.zeros(_MEMORY[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads each byte and writes it.
    seconds = _best(lambda: target.copy_(source), device)
    figures["memory_gb_s"] = 2 * source.numel() / seconds / 1e9
    if device.type == "cuda":
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        place = target[: host.numel()]
        seconds = _best(lambda: place.copy_(host, non_blocking=True), device)
        figures["to_gpu_gb_s"] = host.numel() / seconds / 1e9
    return figures


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest repeat, after one that is not measured."""
    work()
    best, number, end = float("inf"), 0, time.perf_counter() + _SECONDS
    while number < _REPEATS or time.perf_counter() < end:
        synchronise(device)
        begin = time.perf_counter()
        work()
        synchronise(device)
        best, number = min(best, time.perf_counter() - begin), number + 1
    return best
