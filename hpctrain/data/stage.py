"""Copies of shards on the node that reads them: made once per node, ahead of use, verified.

    source ── large reads ── xxh3 ── NAME.part ── rename ── path() ── mapped by the reader

    >>> stage = Stage("s3://bucket/digits", Path(os.environ["TMPDIR"]))
    >>> stage.plan(shards)                # copying begins, in this order, in threads
    >>> with open(stage.path(shards[0]), "rb") as file: ...
    >>> stage.release(shards[0])          # may give way to others

All ranks and jobs of a user on a node share one `Depot`: a shard is copied by one of them, and
several of them copy several shards at once. Staging is never worth an error: where there is no
room, or the folder fails, the shard is read from the source, with one warning. (At a URL that is
not possible; the error says so.) Wrong bytes always are an error.

Why not as others do: no lock files with names, no shared memory segments, no server process,
hence nothing stale after kill -9 (see `Depot`); and a budget that counts every byte before it is
written, so that no disk and no job's memory is filled.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.data.copier import Copier
from hpctrain.data.depot import Depot
from hpctrain.data.index import Shard
from hpctrain.data.origin import open_origin

THREADS = 4  # shards copied at once by a process: one stream does not fill a network


class Stage:
    """A `Place` whose shards are copied to this node; see the module.

    Threads may share it. A fork gets its own state, and so does whoever unpickles it. A process
    that ends, however it ends, leaves no thread, no lock and at most an unfinished copy, which
    the next one removes. Finished copies stay for the next job, but not in memory (/dev/shm),
    where the last who uses one removes it; after a kill -9 of all of them, the next who comes.

    Args:
        source: Folder or URL of the data set.
        base: An existing folder of this node; the shards lie in a private one inside.
        budget_bytes: See `Depot`.
        threads: Shards copied ahead at once.

    Raises:
        StorageError: `base` cannot be used.
        DataError: A package for the URL is not installed.
    """

    _copier: Copier | None
    _finalizer: "weakref.finalize[[], Stage] | None"

    def __init__(
        self,
        source: str | Path,
        base: Path,
        *,
        budget_bytes: int | None = None,
        threads: int = THREADS,
    ) -> None:
        self._given = source, base, budget_bytes, threads
        self._wait_for_use()
        self._here()

    @property
    def folder(self) -> Path:
        """Where the copies lie."""
        return self._here().depot.folder

    @property
    def budget_bytes(self) -> int:
        """What all files there may take together."""
        return self._here().depot.budget_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of the shards that this process has copied from the source."""
        return self._here().copied_bytes

    def path(self, shard: Shard) -> Path:
        """Return a file to open now, which stays until `release`; may wait for its copy.

        Raises:
            DataError: The shard is missing, unreadable or, read twice, not what the index lists.
            StorageError: It cannot be staged, and the source is a URL.
        """
        return self._here().path(shard)

    def plan(self, shards: Sequence[Shard]) -> None:
        """Copy these ahead, in this order, instead of those planned before; returns at once."""
        self._here().plan(shards)

    def release(self, shard: Shard) -> None:
        """Let a shard give way to others; one that is still mapped stays readable."""
        self._here().release(shard)

    def close(self) -> None:
        """Stop copying and release everything; also at the end of the process."""
        if self._finalizer is not None:
            self._finalizer()

    def _here(self) -> Copier:
        with self._lock:
            if self._copier is None:
                source, base, budget_bytes, threads = self._given
                self._copier = Copier(open_origin(source), Depot(base, budget_bytes), threads)
                self._finalizer = weakref.finalize(self, self._copier.stop)
            return self._copier

    def _wait_for_use(self) -> None:
        self._lock = threading.Lock()
        self._copier = self._finalizer = None
        _STAGES.add(self)

    def _forget_parent(self) -> None:
        """In a forked child: the threads are the parent's, and so are the locks."""
        if self._copier is not None:
            self._copier.depot.abandon()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._wait_for_use()

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wait_for_use()


_STAGES: weakref.WeakSet[Stage] = weakref.WeakSet()


def _after_fork() -> None:
    for stage in list(_STAGES):
        stage._forget_parent()


os.register_at_fork(after_in_child=_after_fork)
