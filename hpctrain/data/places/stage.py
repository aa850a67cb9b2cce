"""Copies of shards on the node that reads them, made once per node, before they are used.

source ── large reads ── xxh3 ── NAME.part ── rename ── path() ── mapped by the reader

    >>> stage = Stage("s3://bucket/digits", Path(os.environ["TMPDIR"]))
    >>> stage.plan(shards)                # starts to copy them in threads, in this order
    >>> with open(stage.path(shards[0]), "rb") as file: ...
    >>> stage.release(shards[0])          # from now on it may be evicted

All ranks and all jobs of a user on a node share one `Depot`. Each shard is copied by one of them,
and several of them copy different shards at the same time. A problem with staging is not an error:
if there is no room, or the folder fails, the shard is read from the source, and one warning is
logged. (A data set at a URL cannot be read in place, so there the problem is an error.) Wrong bytes
are always an error.

Nothing stale is left after kill -9 (see `Depot`). The budget counts every byte before it is
written, so staging fills neither a disk nor the memory of a job.
"""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from hpctrain.data.places.copier import Copier
from hpctrain.data.places.depot import Depot
from hpctrain.data.places.origin import open_origin
from hpctrain.shards.index import Shard
from hpctrain.shards.per_process import PerProcess

THREADS = 4  # shards that a process copies at once; one stream does not fill a network


class Stage(PerProcess):
    """A `Place` whose shards are copied to this node.

    Threads may share a stage. A process leaves no thread and no lock behind, however it ends. It
    leaves at most an unfinished copy, which the next process removes. Finished copies stay for the
    next job. In memory (/dev/shm) they do not stay: the last process that uses a copy removes it,
    and if all processes were killed, the next process that opens the depot does. `Depot` and
    `Copier` explain the arguments.
    """

    OWN = ("_lock", "_copier", "_finalizer")
    _copier: Copier | None = None
    _finalizer: "weakref.finalize[[], Stage] | None" = None

    def __init__(
        self,
        source: str | Path,
        base: Path,
        *,
        budget_bytes: int | None = None,
        threads: int = THREADS,
    ) -> None:
        self._arguments = source, base, budget_bytes, threads
        super().__init__()
        self._own_copier()

    @property
    def folder(self) -> Path:
        """The folder that holds the copies."""
        return self._own_copier().depot.folder

    @property
    def budget_bytes(self) -> int:
        """The limit in bytes for all files in the folder together."""
        return self._own_copier().depot.budget_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of the shards that this process has copied from the source."""
        return self._own_copier().copied_bytes

    def path(self, shard: Shard) -> Path:
        """Return a file that can be opened now and stays until `release`. May wait for its copy."""
        return self._own_copier().path(shard)

    def plan(self, shards: Sequence[Shard]) -> None:
        """Copy these shards ahead, in this order, in place of the earlier plan. Returns at once."""
        self._own_copier().plan(shards)

    def release(self, shard: Shard) -> None:
        """Allow that a shard is evicted. A process that has mapped the file can still read it."""
        self._own_copier().release(shard)

    def close(self) -> None:
        """Stop copying and release all shards. The end of the process does the same."""
        if self._finalizer is not None:
            self._finalizer()

    def _own_copier(self) -> Copier:
        with self._lock:
            if self._copier is None:
                source, base, budget_bytes, threads = self._arguments
                self._copier = Copier(open_origin(source), Depot(base, budget_bytes), threads)
                self._finalizer = weakref.finalize(self, self._copier.stop)
            return self._copier

    def _begin(self) -> None:
        if self._copier is not None:  # in a fork, its threads and locks are the parent's
            self._copier.depot.abandon()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._lock = threading.Lock()
        self._copier = self._finalizer = None
