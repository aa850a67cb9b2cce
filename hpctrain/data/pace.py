"""Who waits for whom: the consumer for the reading, or the reading for the consumer."""

IDLE = 1 / 4  # of the time that it waits: a consumer that does less in between does nothing
MEMORY = 10**9  # bytes/s: what comes slower comes from a disk, or has to be decoded
KEPT = 3 / 4  # of what was seen before: about the last four parts count


class Pace:
    """What the consumer of a loader did of late."""

    def __init__(self) -> None:
        self._waited_s = self._busy_s = self._nbytes = 0.0

    def saw(self, waited_s: float, busy_s: float, nbytes: int) -> None:
        """The consumer waited for `nbytes`, and then was busy until it asked for more."""
        self._waited_s = KEPT * self._waited_s + waited_s
        self._busy_s = KEPT * self._busy_s + busy_s
        self._nbytes = KEPT * self._nbytes + nbytes

    @property
    def of_memory(self) -> bool:
        """Whether the consumer does nothing but wait, and what for comes from memory."""
        idle = self._busy_s < IDLE * self._waited_s
        return idle and self._nbytes > MEMORY * self._waited_s
