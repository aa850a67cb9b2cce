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
    """Asks how a save stands on this rank, and tells what the last step has summed over all.

    Nothing is added to the reduction until `begin` is called.
    """

    def __init__(self) -> None:
        self._look: Callable[[], tuple[str, Ranks]] | None = None
        self._about, self._totals = "", Copied()

    def begin(self, look: Callable[[], tuple[str, Ranks]]) -> None:
        """Tell the other ranks what `look` returns: the name of a save, and how it stands here.

        All ranks call this before the same step.
        """
        self._look = look

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction, which may be empty."""
        if self._look is None:
            return []
        self._about, own = self._look()
        return [*map(float, own)]

    def offer(self, totals: list[float] | torch.Tensor) -> None:
        """Store the reduced flags without waiting for the device."""
        if self._look is not None:
            self._totals.offer(totals, self._about)

    def agreed(self, save: str) -> Iterator[Ranks]:
        """Yield what all ranks have told of a save, as far as it was not taken yet.

        On a GPU a step is read after the next one, as it is with all numbers.
        """
        for totals, about in self._totals.take(late=True):
            if about == save:
                yield Ranks(*totals)
