"""Check that the bytes of the shards are those that the index lists (`data.verify`).

    full        every shard before the first batch, divided among the ranks
    first_use   a shard when a process opens it for the first time
    off         only sizes, schema and staged copies, which are always checked

A digest covers the whole file, so a shard that was edited, truncated, replaced or swapped with
another one is found and named.

    >>> place = verified(place, "full", "data/digits", shards, rank=0, ranks=2)
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hpctrain.data.places.origin import Origin, pour
from hpctrain.data.places.placement import Place
from hpctrain.data.places.progress_log import Progress
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.index import Shard
from hpctrain.shards.per_process import PerProcess
from hpctrain.terminal import few

MODES = ("off", "first_use", "full")
THREADS = 8
NAMED = 20  # wrong shards listed in one message


def verified(
    place: Place,
    mode: str,
    source: str | Path,
    shards: Sequence[Shard],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Place:
    """Return a place that checks shards according to `mode`. "full" checks them in this call.

    The `ranks` divide the work of "full", so an error on one rank must end all of them.
    """
    if mode not in MODES:
        raise ConfigError(f"data.verify={mode}: it is one of {', '.join(MODES)}")
    if mode == "full":
        verify(source, shards[rank::ranks])
    return Verified(place) if mode == "first_use" else place


def verify(source: str | Path, shards: Sequence[Shard]) -> None:
    """Compare the digests of shards, where the data set lies, with the index.

    The DataError names every wrong shard.
    """
    origin = Origin(source)
    progress = Progress("verifying", sum(shard.bytes for shard in shards))

    def problem(shard: Shard) -> str:
        try:
            pour(origin, shard, lambda block: progress.add(len(block)))
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(THREADS, "hpctrain-verify") as pool:
        problems = [text for text in pool.map(problem, shards) if text]
    if problems:
        raise DataError(
            f"{len(problems)} of {len(shards)} shards are wrong: {few(problems, NAMED, '; ')}"
        )


class Verified(PerProcess):
    """A `Place` that compares a shard with the index when this process first opens it.

    A forked child knows which shards its parent has verified.
    """

    OWN = ("_locks",)

    def __init__(self, place: Place) -> None:
        self._place = place
        self._right: set[tuple[str, Path]] = set()
        super().__init__()

    def _begin(self) -> None:
        self._locks: dict[str, threading.Lock] = {}

    def path(self, shard: Shard) -> Path:
        """Return the file of a shard, verified; see `Place`."""
        path = self._place.path(shard)
        key = (shard.digest, path)
        if key not in self._right:
            with self._locks.setdefault(shard.digest, threading.Lock()):
                if key not in self._right:
                    check_digest(path, shard)
                    self._right.add(key)
        return path

    def plan(self, shards: Sequence[Shard]) -> None:  # noqa: D102
        self._place.plan(shards)

    def release(self, shard: Shard) -> None:  # noqa: D102
        self._place.release(shard)

    def close(self) -> None:  # noqa: D102
        self._place.close()


def check_digest(path: Path, shard: Shard) -> None:
    """Compare all bytes of a file with the index. The file may have another name than the shard."""
    try:
        pour(Origin(path.parent), replace(shard, path=path.name), lambda block: None)
    except DataError as error:  # a copy has another name
        raise error if path.match(shard.path) else DataError(f"{shard.path}: {error}") from None
