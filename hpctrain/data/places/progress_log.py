"""Log the progress of a long copy or check from time to time. A short one logs nothing."""

import logging
import threading
import time

log = logging.getLogger(__name__)

EVERY_S = 10.0


class ProgressLog:
    """Counts bytes, from any thread."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started = self._logged_at = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` more bytes as processed."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._logged_at < EVERY_S:
                return
            self._logged_at = now
        rate = self._done / (now - self._started)
        log.info(
            "%s: %.1f of %.1f GB, %.0f MB/s, %.0f s left",
            *(self._what, self._done / 1e9, self._total / 1e9),
            *(rate / 1e6, max(0, self._total - self._done) / max(1.0, rate)),
        )
