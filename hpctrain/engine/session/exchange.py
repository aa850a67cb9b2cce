"""The one reduction of a step: the sums of the loop, and what parts let all ranks know.

sums of the loop ──┐
flags of each part ┴── one all-reduce ── sums, and to each part the totals of its flags
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch

from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.scalars import Numbers, joined, on_device


class Asks(Protocol):
    """What has numbers in the reduction, as a stop request has."""

    def flags(self) -> list[float]:
        """Return this rank's numbers, always as many."""

    def offer(self, totals: torch.Tensor) -> None:
        """Take their sums over all ranks."""


class Exchange:
    """Reduces the numbers of a step over all ranks of a mesh, with the flags of `asking`.

    Attributes:
        asking: What has flags, in the same order on all ranks.
        made: Whether a step has made its reduction, since somebody has set this to False.
    """

    def __init__(self, mesh: Mesh, asking: Sequence[Asks] = ()) -> None:
        self._mesh, self.asking, self.made = mesh, [*asking], False

    def reduce(
        self,
        values: Numbers | None = None,
        join: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of `values`, shape (n,), over all ranks, and what `join` has added.

        The values are on the device of the mesh: float64, or floats on a CPU. `join` may append
        more to what is reduced.
        """
        flags = [each.flags() for each in self.asking]
        every = [*chain(*flags)]
        count = 0 if values is None else len(values)
        mine = on_device(every, self._mesh.device) if values is None else joined(values, every)
        reduced = join(mine)
        self._mesh.add(reduced)
        rest = reduced[count:]
        for each, own in zip(self.asking, flags, strict=True):
            each.offer(rest[: len(own)])
            rest = rest[len(own) :]
        self.made = True
        return reduced[:count], rest
