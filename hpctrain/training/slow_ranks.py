"""Name a rank that works much longer than the others, which wait for it in every step.

    each rank   seconds of work of its main thread, and of waiting for its own data
    log step    one reduction of two numbers for each rank ── median of the others ── a line

All ranks take equally long for a step, because they wait for each other. Their work differs: a
thread that waits in a collective operation of gloo sleeps. So its work is the time on a core, and
the time of waiting for a core, as Linux counts them. The thread that drives a GPU does not work as
long as the GPU does; there only the waiting for data is compared.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hpctrain.parallel.mesh import Mesh

log = logging.getLogger(__name__)
_RATIO = 1.5  # times the median of the other ranks
_SHARE = 0.2  # of the time of the steps that the others lose
_LEAST_S = 10.0  # shorter intervals say little
_SILENT_S = 600.0  # from one line to the next


def worked_s() -> float:
    """Return the seconds that this thread has been on a core or has waited for one."""
    try:
        on_core, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without it
        return time.thread_time()
    return (int(on_core) + int(waiting)) / 1e9


class SlowRanks:
    """Compares the work of the ranks at log steps.

    Args:
        mesh: The ranks.
        rank: This rank.
        host: Returns the node of a rank; "" if unknown.
        least_s: Compare only after so many seconds of training.
    """

    def __init__(
        self, mesh: Mesh, rank: int, host: Callable[[int], str], least_s: float = _LEAST_S
    ) -> None:
        self._mesh, self._rank, self._host, self._least_s = mesh, rank, host, least_s
        self._trained_s = self._own_s = 0.0
        self._told = -float("inf")

    def compare(self, trained_s: float, worked_s: float, waited_s: float) -> None:
        """Compare with the other ranks; each of them calls this at the same log steps.

        Args:
            trained_s: The time since the last log step, without evaluations and checkpoints.
            worked_s: The work of the main thread in this time.
            waited_s: The seconds of it in which this rank has waited for its data.
        """
        mesh, ranks = self._mesh, self._mesh.degrees.ranks
        if ranks == 1:
            return
        work_s = waited_s + (worked_s if mesh.device.type == "cpu" else 0.0)
        self._trained_s += trained_s
        self._own_s += work_s / mesh.weight  # a rank of weight 2 takes twice as many samples
        table = torch.zeros(ranks, 2, dtype=torch.float64)
        table[self._rank] = torch.tensor([self._trained_s, self._own_s], dtype=torch.float64)
        table = table.to(mesh.device)
        mesh.add(table)
        trained, own = table.T.tolist()
        if min(trained) < self._least_s:
            return
        self._trained_s = self._own_s = 0.0
        slow = slowest(own, max(trained), ranks // mesh.degrees.pp)
        if slow is not None and self._rank == 0 and time.monotonic() - self._told > _SILENT_S:
            self._told = time.monotonic()
            rank, ratio = slow
            place = f" ({self._host(rank)})" if self._host(rank) else ""
            log.warning(
                "rank %d%s is slow: in the last %.0f s it has worked %.1f times as long as the "
                "median of the other ranks, which wait for it",
                *(rank, place, max(trained), ratio),
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
