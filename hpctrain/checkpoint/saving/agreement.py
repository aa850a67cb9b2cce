"""What the ranks tell each other of a save under way, in the reduction that every step makes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hpctrain.faults.copied import Copied


class Ranks(NamedTuple):
    """How many ranks still write, how many have failed, and whether rank 0 has to commit."""

    writing: float = 0
    failed: float = 0
    uncommitted: float = 0


class Agreement:
    """Nothing is added to the reduction until all ranks have set `look`, before the same step.

    Attributes:
        look: Returns a name of the save under way, and how it stands on this rank.
    """

    def __init__(self) -> None:
        self.look: Callable[[], tuple[str, Ranks]] | None = None
        self._about, self._totals = "", Copied()

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction, which may be empty."""
        self._about, own = ("", ()) if self.look is None else self.look()
        return [*map(float, own)]

    def offer(self, totals: list[float] | torch.Tensor) -> None:
        """Store the reduced flags without waiting for the device."""
        if self.look is not None:
            self._totals.offer(totals, self._about)

    def agreed(self, save: str) -> Iterator[Ranks]:
        """Yield what all ranks have told of a save; of a step on a GPU after the next one."""
        return (Ranks(*told) for told, about in self._totals.take(late=True) if about == save)
