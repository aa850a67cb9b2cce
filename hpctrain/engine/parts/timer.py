"""`checkpoint.every_s`: a checkpoint by the clock, on all ranks alike.

rank 0's clock ── a flag in the reduction of the step ── all ranks save after the same step

The clocks of ranks differ, so only that of rank 0 counts. As for a stop request, the flag is read
after the step on the CPU, and after the next one on a GPU (`hpctrain.engine.faults.copied`).
"""

import time
from collections.abc import Callable

from hpctrain.engine.faults.copied import Copied
from hpctrain.engine.parallel.reducing.scalars import Numbers


class Timer:
    """Tells when the seconds since the last checkpoint are over.

    Without `every_s` it is the null form, which adds nothing to the reduction. The clock of one
    rank alone `decides`; it returns seconds that never decrease.
    """

    def __init__(
        self,
        every_s: float | None = None,
        *,
        decides: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._decides, self._clock = every_s, decides, clock
        self._since = clock()
        self._totals = Copied()

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction: nothing, or 1.0 when the time is over."""
        if self._every_s is None:
            return []
        return [float(self._decides and self._passed >= self._every_s)]

    def offer(self, totals: Numbers) -> None:
        """Store the reduced flags without waiting for the device."""
        if self._every_s is not None:
            self._totals.offer(totals)

    def is_due(self) -> bool:
        """Return whether the ranks have agreed that it is time; the same on every rank."""
        if self._every_s is None:
            return False
        return any(totals[0] > 0 for totals, _ in self._totals.take(late=True))

    def restart(self) -> None:
        """Count from now on, after what the timer was for."""
        self._since = self._clock()
        self._totals = Copied()  # a flag on its way asked for what was just done

    @property
    def _passed(self) -> float:
        return self._clock() - self._since
