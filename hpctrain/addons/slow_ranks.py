"""Name a rank that works much longer than the others, which wait for it in every step.

    each rank   its own time: work of its main thread, waiting for its data, being blocked
    log step    one reduction of some numbers for each rank ── median of the others ── a note
                                                            ── the largest memory

All ranks take equally long for a step, because they wait for each other. Their own time differs: a
thread that waits in a collective operation of gloo sleeps. So its work is the time on a core, and
the time of waiting for a core, as Linux counts them. The thread that drives a GPU does not work as
long as the GPU does; there only the waiting for data is compared.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parts.clocks import Interval

_SILENT_S = 600.0  # from one line about a rank to the next
_LEAST_S = 10.0  # of training, before a note names a rank
# A rank is slow that takes so many times the median of the others, who so lose this share of the
# time of the steps.
_TIMES, _SHARE = 1.5, 0.2


class Compared(NamedTuple):
    """What the ranks have found together."""

    memory: tuple[float, float]  # the largest of the ranks' two peaks, in bytes
    lost_s: float = 0.0  # what the others have lost to a rank that a note names


class SlowRanks:
    """Compares the ranks at log steps.

    `host` returns the node of a rank, "" if unknown. A note names a slow rank only after `least_s`
    of training. `say` gets the note, and
    what it is about; "" when there is none any more.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        host: Callable[[int], str],
        least_s: float = _LEAST_S,
        say: Callable[[str, str], None] = lambda text, about: None,
    ) -> None:
        self._say = say
        self._mesh, self._rank, self._host, self._least_s = mesh, rank, host, least_s
        self._on_cpu = mesh.device.type == "cpu"
        self._stage = mesh.degrees.ranks // mesh.degrees.pp
        self._trained_s = 0.0
        self._own_s = [0.0] * mesh.degrees.ranks
        # Seconds of training, which are the same on all ranks, and the rank of the last note.
        self._now, self._told, self._slow = 0.0, 0.0, -1

    def compare(self, own: Interval) -> Compared:
        """Compare with the other ranks; each of them calls this at the same log steps."""
        mesh, ranks = self._mesh, self._mesh.degrees.ranks
        own_s = own.waited_s + (own.worked_s if self._on_cpu else 0.0)
        # A rank of weight 2 takes twice as many samples.
        numbers = [own.trained_s, own_s / mesh.weight, *own.memory]
        table = torch.zeros(ranks, len(numbers), dtype=torch.float64)
        table[self._rank] = torch.tensor(numbers, dtype=torch.float64)
        table = table.to(mesh.device)
        mesh.add(table)
        trained, owns, peak, reserved = table.T.tolist()
        return Compared((max(peak), max(reserved)), self._lost_to_one(max(trained), owns))

    def _lost_to_one(self, trained_s: float, owns: Sequence[float]) -> float:
        """Note a rank that is much slower for a while; return the seconds that the others lose."""
        self._now += trained_s
        self._trained_s += trained_s
        self._own_s = [a + b for a, b in zip(self._own_s, owns, strict=True)]
        own_s, trained_s = self._own_s, self._trained_s
        slow = slowest(own_s, trained_s, self._stage)
        if trained_s < self._least_s:
            return 0.0
        self._trained_s, self._own_s = 0.0, [0.0] * len(own_s)
        if slow is None:
            self._say("", "")
            self._slow = -1
            return 0.0
        rank, ratio, lost_s = slow
        if rank != self._slow or self._now - self._told > _SILENT_S:
            self._slow, self._told = rank, self._now
            on = f" ({self._host(rank)})" if self._host(rank) else ""
            shown = f"{ratio:.1f}" if ratio < 100 else "more than 100"
            self._say(
                f"rank {rank}{on} is slow: in the last {trained_s:.0f} s its own part of the steps "
                f"took {shown} times as long as the median of the other ranks, which wait for it",
                f"{rank} {self._now:.0f}",
            )
        return lost_s


def slowest(
    own_s: Sequence[float], trained_s: float, stage: int
) -> tuple[int, float, float] | None:
    """Return a rank whose own time is much longer, how many times, and the seconds that it costs.

    It is compared with the `stage` ranks that have the same layers: others have other work.
    """
    found: list[tuple[float, int, float]] = []
    for rank, own in enumerate(own_s):
        first = rank // stage * stage
        others = [own_s[other] for other in range(first, first + stage) if other != rank]
        median = statistics.median(others) if others else own
        if own > _TIMES * median and own - median > _SHARE * trained_s:
            found.append((own - median, rank, own / max(median, 1e-3)))
    lost_s, rank, times = max(found, default=(0.0, 0, 0.0))
    return (rank, times, lost_s) if found else None
