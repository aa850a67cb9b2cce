"""How fast counters rise, from one reading to the next."""

from __future__ import annotations

import time


class Rates:
    """The last reading of each counter, by name."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def of(self, name: str, total: float) -> float | None:
        """Return how fast a counter has risen per second; None at its first reading or a reset."""
        now = time.monotonic()
        before = self._before.get(name)
        self._before[name] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])
