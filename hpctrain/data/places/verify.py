"""Whether the shards are those that the index lists, byte by byte (`data.verify`).

    full        every shard before the first batch, divided among the ranks
    first_use   a shard when a process first opens it
    off         sizes, schema and staged copies only, which are always checked

A digest is of the whole file, so a shard that was edited, truncated, replaced or swapped with
another is found and named.

    >>> place = verified(place, "full", "data/digits", shards, rank=0, ranks=2)
"""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.data.index import FILE, Shard
from hpctrain.data.places.origin import FolderOrigin, Origin, WrongShard, open_origin, pour
from hpctrain.data.places.place import Place
from hpctrain.data.places.progress_log import Progress
from hpctrain.errors import ConfigError, DataError

MODES = ("off", "first_use", "full")
THREADS = 8
NAMED = 20  # wrong shards in one message


def verified(
    place: Place,
    mode: str,
    source: str | Path,
    shards: Sequence[Shard],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Place:
    """Return `place` as `mode` wants it to be verified; "full" verifies here and now.

    Args:
        place: Where the shards are opened.
        mode: One of MODES.
        source: Folder or URL of the data set.
        shards: Those in question.
        rank: Of `ranks` that share the work of "full"; an error on one must end all.
        ranks: See `rank`.

    Raises:
        ConfigError: Another mode.
        DataError: With "full": see `verify`.
    """
    if mode not in MODES:
        raise ConfigError(f"data.verify={mode}: it is one of {', '.join(MODES)}")
    if mode == "full":
        verify(source, shards[rank::ranks], known=shards)
    return Verified(place) if mode == "first_use" else place


def verify(source: str | Path, shards: Sequence[Shard], known: Sequence[Shard] = ()) -> None:
    """Read shards where the data set lies, in threads, and compare them with the index.

    Args:
        source: Folder or URL of the data set.
        shards: To read.
        known: Shards of the data set: where a file holds what is listed under another name, the
            message says which.

    Raises:
        DataError: Names every shard that is missing, unreadable or wrong.
    """
    origin = open_origin(source)
    progress = Progress("verifying", sum(shard.bytes for shard in shards))
    names = {shard.digest: shard.path for shard in (*known, *shards)}

    def problem(shard: Shard) -> str | None:
        return _problem(origin, shard, names, progress)

    with ThreadPoolExecutor(THREADS, "hpctrain-verify") as pool:
        problems = [text for text in pool.map(problem, shards) if text]
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise DataError(
            f"{len(problems)} of {len(shards)} shards are wrong: "
            + "; ".join(problems[:NAMED])
            + more
        )


class Verified:
    """A `Place` whose shards are compared with the index when this process first opens them.

    A fork knows what its parent had verified.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._right: set[tuple[str, Path]] = set()
        self._start()

    def path(self, shard: Shard) -> Path:
        """See `Place`.

        Raises:
            DataError: The file is not what the index lists.
            StorageError: It cannot be had.
        """
        path = self._place.path(shard)
        key = (shard.digest, path)
        if key not in self._right:
            if self._pid != os.getpid():  # forked: a thread of the parent may hold a lock
                self._start()
            with self._locks.setdefault(shard.digest, threading.Lock()):
                if key not in self._right:
                    _check(path, shard)
                    self._right.add(key)
        return path

    def plan(self, shards: Sequence[Shard]) -> None:  # noqa: D102
        self._place.plan(shards)

    def release(self, shard: Shard) -> None:  # noqa: D102
        self._place.release(shard)

    def close(self) -> None:  # noqa: D102
        self._place.close()

    def _start(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._pid = os.getpid()  # last: whoever sees it sees the rest

    def __getstate__(self) -> dict[str, Any]:
        return {"_place": self._place, "_right": self._right}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _problem(
    origin: Origin, shard: Shard, names: Mapping[str, str], progress: Progress
) -> str | None:
    """What is wrong with a shard."""
    try:
        pour(origin, shard, lambda block: progress.add(len(block)))
    except WrongShard as error:
        if other := names.get(error.found):
            return f"shard {origin.name}/{shard.path} holds what {FILE} lists as {other}"
        return str(error)
    except DataError as error:
        return str(error)
    return None


def _check(path: Path, shard: Shard) -> None:
    """Compare a file, whatever its name, with the index."""
    try:
        pour(FolderOrigin(path.parent), replace(shard, path=path.name), lambda block: None)
    except DataError as error:  # a copy has another name
        raise error if path.match(shard.path) else DataError(f"{shard.path}: {error}") from None
