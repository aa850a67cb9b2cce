"""The one reduction of a step: the sums of the loop, and what parts let all ranks know.

sums of the loop ──┐
flags of each part ┴── one all-reduce ── sums, and to each part the totals of its flags
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch

from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.scalars import Numbers, joined, on_host


class Asks(Protocol):
    """What has numbers in the reduction, as a stop request has."""

    def flags(self) -> list[float]:
        """Return this rank's numbers, always as many."""

    def offer(self, totals: Numbers) -> None:
        """Take their sums over all ranks."""


class Exchange:
    """Reduces the numbers of a step over all ranks of a mesh, with the flags of `asking`.

    Attributes:
        asking: What has flags, in the same order on all ranks.
    """

    def __init__(self, mesh: Mesh, asking: Sequence[Asks] = ()) -> None:
        self._mesh, self.asking = mesh, [*asking]

    def reduce(
        self,
        values: Numbers,
        join: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    ) -> tuple[Numbers, torch.Tensor]:
        """Return the sums of `values` over all ranks, and what `join` has added, as a tensor.

        `join` may append more to what is reduced. The host reads the numbers of a CPU once.
        """
        flags = [each.flags() for each in self.asking]
        reduced = join(joined(values, [*chain(*flags)]))
        self._mesh.add(reduced)
        known, place = on_host(reduced), len(values)
        for each, own in zip(self.asking, flags, strict=True):
            if own:
                each.offer(known[place : place + len(own)])
                place += len(own)
        rest = reduced if place == len(known) else reduced[place:]
        return known[: len(values)], rest
