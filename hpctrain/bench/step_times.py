"""The time of each step, without making a GPU wait between two steps.

steps   ─┬──────┬──────┬──────┬─
marks    0      1      2      3      on a GPU: events, read when all steps are done
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from hpctrain.doctor.measures.all_reduce import synchronise


def measured(
    work: Callable[[], object], device: torch.device, warm_up: int, steps: int
) -> list[float]:
    """Return the seconds of each step."""
    for _ in range(warm_up):
        work()
    synchronise(device)
    marks = list(_marks(work, device, steps))
    synchronise(device)
    if device.type == "cuda":
        return [first.elapsed_time(second) / 1000 for first, second in pairwise(marks)]
    return [second - first for first, second in pairwise(marks)]


def _marks(work: Callable[[], object], device: torch.device, steps: int) -> Iterator[Any]:
    yield _mark(device)
    for _ in range(steps):
        work()
        yield _mark(device)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
