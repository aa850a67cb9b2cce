"""Check that the bytes of shards are those that the index lists (`data.verify`).

    first_use   a shard when a process opens it for the first time: see `sources.opened`
    off         only sizes, schema and staged copies, which are always checked

A digest covers the whole file, so a shard that was edited, truncated, replaced or swapped with
another one is found and named.
"""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

from hpctrain.base.errors import DataError
from hpctrain.data.places.origin import Origin, pour
from hpctrain.data.shards.index import Shard

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


def check_digest(path: Path, shard: Shard) -> None:
    """Compare all bytes of a file with the index. The file may have another name than the shard."""
    try:
        pour(Origin(path.parent), replace(shard, path=path.name), lambda block: None)
    except DataError as error:  # a copy has another name
        raise error if path.match(shard.path) else DataError(f"{shard.path}: {error}") from None
