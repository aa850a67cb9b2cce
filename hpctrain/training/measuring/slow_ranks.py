"""Name a rank that works much longer than the others, which wait for it in every step.

    each rank   seconds of work of its main thread, and of waiting for its own data
    log step    one reduction of some numbers for each rank ── median of the others ── a line
                                                            ── the slowest rank, the largest memory

All ranks take equally long for a step, because they wait for each other. Their work differs: a
thread that waits in a collective operation of gloo sleeps. So its work is the time on a core, and
the time of waiting for a core, as Linux counts them. The thread that drives a GPU does not work as
long as the GPU does; there only the waiting for data is compared.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hpctrain.parallel.mesh import Mesh

log = logging.getLogger(__name__)
_RATIO = 1.5  # times the median of the other ranks
_SHARE = 0.2  # of the time of the steps that the others lose
_LEAST_S = 10.0  # shorter intervals say little
_SILENT_S = 600.0  # from one line to the next
_KEPT = 64  # reports from which the seconds of a sample are taken
_LEAST_WAIT = 0.01  # of the time of the steps: GPUs that wait less for data are not told apart


class WorkClock:
    """The seconds that the thread which makes it has been on a core, or has waited for one."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without it
            self._fd = -1

    def __call__(self) -> float:
        """Return them; the file stays open, because opening it takes ten times as long."""
        if self._fd < 0:
            return time.thread_time()
        on_core, waiting, _ = os.pread(self._fd, 64, 0).split()
        return (int(on_core) + int(waiting)) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Interval(NamedTuple):
    """What a rank has measured since the last log step.

    Attributes:
        trained_s: The time of the steps, without evaluations and checkpoints.
        worked_s: The work of the main thread in this time.
        waited_s: The seconds of it in which this rank has waited for its data.
        memory: The peak of the memory of the GPU that tensors needed, and of what was reserved, in
            bytes.
        samples: The samples of all ranks in this time.
    """

    trained_s: float
    worked_s: float
    waited_s: float
    memory: tuple[float, float] = (0.0, 0.0)
    samples: int = 0


class Compared(NamedTuple):
    """What the ranks have found together.

    Attributes:
        slowest: The rank that the others have waited for most; None if it cannot be told.
        memory: The largest of the ranks' two peaks of memory, in bytes.
    """

    slowest: int | None
    memory: tuple[float, float]


class SlowRanks:
    """Compares the ranks at log steps.

    Args:
        mesh: The ranks.
        rank: This rank.
        host: Returns the node of a rank; "" if unknown.
        least_s: A line names a slow rank only after so many seconds of training.
        record: Gets the seconds of each rank for one of its samples at the end, on CPUs.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        host: Callable[[int], str],
        least_s: float = _LEAST_S,
        record: Callable[[list[float]], None] | None = None,
    ) -> None:
        self._record = record
        self._reports = 0
        self._of_a_sample: deque[list[float]] = deque(maxlen=_KEPT)
        self._mesh, self._rank, self._host, self._least_s = mesh, rank, host, least_s
        self._on_cpu = mesh.device.type == "cpu"
        self._alone = mesh.degrees.ranks == 1
        self._trained_s = 0.0
        self._own_s = [0.0] * mesh.degrees.ranks
        self._told = -float("inf")

    def compare(self, own: Interval) -> Compared:
        """Compare with the other ranks; each of them calls this at the same log steps."""
        if self._alone:
            return Compared(None, own.memory)
        mesh, ranks = self._mesh, self._mesh.degrees.ranks
        work_s = own.waited_s + (own.worked_s if self._on_cpu else 0.0)
        # A rank of weight 2 takes twice as many samples.
        numbers = [own.trained_s, work_s / mesh.weight, *own.memory]
        table = torch.zeros(ranks, len(numbers), dtype=torch.float64)
        table[self._rank] = torch.tensor(numbers, dtype=torch.float64)
        table = table.to(mesh.device)
        mesh.add(table)
        trained, worked, peak, reserved = table.T.tolist()
        self._warn(max(trained), worked)
        self._keep(worked, own.samples)
        most = max(worked)
        told = self._on_cpu or most > _LEAST_WAIT * max(trained)
        return Compared(worked.index(most) if told else None, (max(peak), max(reserved)))

    def close(self) -> None:
        """Record how long each rank works for a sample: the medians of the last reports."""
        if self._record is not None and self._of_a_sample:
            by_rank = zip(*self._of_a_sample, strict=True)
            self._record([statistics.median(seconds) for seconds in by_rank])

    def _keep(self, worked: Sequence[float], samples: int) -> None:
        """Keep the seconds of a sample, but those of the first report, which starts everything."""
        self._reports += 1
        if self._on_cpu and self._reports > 1 and samples:
            share = samples / self._mesh.shares
            self._of_a_sample.append([seconds / share for seconds in worked])

    def _warn(self, trained_s: float, worked: Sequence[float]) -> None:
        """Name the rank that is much slower than the others, once it has been so for a while."""
        self._trained_s += trained_s
        self._own_s = [a + b for a, b in zip(self._own_s, worked, strict=True)]
        if self._trained_s < self._least_s:
            return
        own_s, trained_s = self._own_s, self._trained_s
        self._trained_s, self._own_s = 0.0, [0.0] * len(own_s)
        slow = slowest(own_s, trained_s, len(own_s) // self._mesh.degrees.pp)
        if slow is not None and self._rank == 0 and time.monotonic() - self._told > _SILENT_S:
            self._told = time.monotonic()
            rank, ratio = slow
            place = f" ({self._host(rank)})" if self._host(rank) else ""
            log.warning(
                "rank %d%s is slow: in the last %.0f s it has worked %.1f times as long as the "
                "median of the other ranks, which wait for it",
                *(rank, place, trained_s, ratio),
            )


def slowest(own_s: Sequence[float], trained_s: float, stage: int) -> tuple[int, float] | None:
    """Return the rank that works much longer than the others, and how many times as long.

    Args:
        own_s: The seconds of work of each rank.
        trained_s: The time in which they have worked.
        stage: The number of ranks that have the same layers: others have other work.

    Returns:
        None if there is no such rank, or it costs the others less than a fifth of the time.
    """
    found: list[tuple[float, int]] = []
    for rank, own in enumerate(own_s):
        first = rank // stage * stage
        others = [own_s[other] for other in range(first, first + stage) if other != rank]
        median = statistics.median(others) if others else own
        if own > _RATIO * median and own - median > _SHARE * trained_s:
            found.append((own / max(median, 1e-3), rank))
    ratio, rank = max(found, default=(0.0, 0))
    return (rank, ratio) if found else None
