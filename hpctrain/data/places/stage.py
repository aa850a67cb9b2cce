"""Copies of shards on the node that reads them, made once per node, before they are used.

source ── large reads ── xxh3 ── NAME.part ── rename ── path() ── mapped by the reader

    >>> stage = Stage("s3://bucket/digits", Path(os.environ["TMPDIR"]))
    >>> stage.plan(shards)                # starts to copy them in threads, in this order
    >>> with open(stage.path(shards[0]), "rb") as file: ...
    >>> stage.close()                     # from now on they may be evicted

All ranks and all jobs of a user on a node share one `Depot`. Each shard is copied by one of them,
and several of them copy different shards at the same time. A problem with staging is not an error:
if there is no room, or the folder fails, the shard is read from the source, and one warning is
logged. (A data set at a URL cannot be read in place, so there the problem is an error.) Wrong bytes
are always an error.

Nothing stale is left after kill -9 (see `Depot`). The budget counts every byte before it is
written, so staging fills neither a disk nor the memory of a job.
"""

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from hpctrain.base.forks import PerProcess
from hpctrain.base.units import readable
from hpctrain.data.places.depot import Depot
from hpctrain.data.places.origin import Origin, digest_of, pour
from hpctrain.data.places.verification import ProgressLog
from hpctrain.data.shards.index import Shard
from hpctrain.errors import StorageError

log = logging.getLogger(__name__)

THREADS = 4  # shards that a process copies at once; one stream does not fill a network
_NAP_S = 0.05  # pause while another process copies a shard

_State = Literal["staged", "busy", "no room"]


class Stage(PerProcess):
    """A `Place` whose shards are copied to this node, into the `Depot` of `base`.

    A shard that was given to `plan` or `path` is "held" until `close`, or until another plan if it
    was only planned: it is staged, and a lock of this process keeps it from eviction. Threads may
    share a stage. A process leaves no thread and no lock behind, however it ends. It leaves at most
    an unfinished copy, which the next process removes. Finished copies stay for the next job. In
    memory (/dev/shm) they do not stay: the last process that uses a copy removes it, and if all
    processes were killed, the next process that opens the depot does.
    """

    def __init__(self, source: str | Path, base: Path, budget_bytes: int | None = None) -> None:
        self._arguments = source, base, budget_bytes
        self._origin = Origin(source)
        super().__init__()
        self._open()
        atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stage, self._arguments

    def _begin(self) -> None:
        if "_depot" in vars(self) and self._depot is not None:
            self._depot.abandon()  # in a fork, its threads and locks are the parent's
        self._depot: Depot | None = None
        self._changed = threading.Condition()  # guards all attributes below
        self._planned: dict[str, Shard] = {}
        self._in_use: set[str] = set()  # given out by `path`
        self._queue: SimpleQueue[Shard | None] = SimpleQueue()  # to copy ahead; None: the end
        self._copying: set[str] = set()
        self._held: dict[str, Shard] = {}  # staged, and locked against eviction
        self._threads: list[threading.Thread] = []
        self._progress = ProgressLog("staging", 0)
        self._warned = self._stopped = False
        self._failure = ""
        self.copied_bytes = 0  # of the shards that this process has copied from the source

    @property
    def folder(self) -> Path:
        """The folder that holds the copies."""
        return self._open().folder

    @property
    def budget_bytes(self) -> int:
        """The limit in bytes for all files in the folder together."""
        return self._open().budget_bytes

    def path(self, shard: Shard) -> Path:
        """Return a file that can be opened now and stays until `close`. May wait for its copy."""
        depot = self._open()
        with self._changed:
            self._in_use.add(digest_of(shard))
        if self._obtain(shard, ahead=False) == "staged":
            return depot.path(shard)
        reason = self._failure or (
            f"the staging budget of {readable(depot.budget_bytes)}, or the disk, is full of shards "
            "in use"
        )
        with self._changed:
            self._in_use.discard(digest_of(shard))
        if self._origin.folder is None:
            raise StorageError(
                f"{shard.path} cannot be staged in {depot.folder}: {reason}; and "
                f"{self._origin.name} cannot be read in place"
            )
        with self._changed:
            warned, self._warned = self._warned, True
        if not warned:
            log.warning(
                "staging into %s: %s. From now on what is not staged is read from %s",
                *(depot.folder, reason, self._origin.name),
            )
        return self._origin.folder / shard.path

    def plan(self, shards: Sequence[Shard]) -> None:
        """Copy these shards ahead, in this order, in place of the earlier plan. Returns at once."""
        depot = self._open()
        with self._changed:
            self._planned = {digest_of(shard): shard for shard in shards}
            for digest in self._held.keys() - self._planned.keys() - self._in_use:
                depot.drop(self._held.pop(digest))
            missing = [shard for digest, shard in self._planned.items() if digest not in self._held]
            self._progress = ProgressLog("staging", sum(shard.bytes for shard in missing))
            for shard in missing:
                self._queue.put(shard)
            while missing and len(self._threads) < THREADS:
                name = f"hpctrain-stage-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Stop copying and release all shards. The end of the process does the same."""
        atexit.unregister(self.close)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            for _ in self._threads:
                self._queue.put(None)
            # A read that hangs because its server is dead must not stop the process from ending.
            idle = self._changed.wait_for(lambda: not self._copying, timeout=5)
        if idle and self._depot is not None:
            for thread in self._threads:
                thread.join(timeout=5)
            self._depot.close()

    def _open(self) -> Depot:
        """Return the depot, which a fork opens anew."""
        with self._changed:
            if self._depot is None:
                self._depot = Depot(*self._arguments[1:])
            return self._depot

    def _work(self) -> None:
        """Copy planned shards, for as long as there is room."""
        while (shard := self._queue.get()) is not None:
            try:
                state = self._obtain(shard, ahead=True)
            except _Stopped:
                return
            except Exception as error:  # a later call of `path` raises it
                log.debug("%s is not staged ahead: %s", shard.path, error)
                continue
            if state == "busy":  # work on other shards first
                with self._changed:
                    self._changed.wait(_NAP_S)
                self._queue.put(shard)

    def _obtain(self, shard: Shard, *, ahead: bool) -> _State:
        """Make sure that a shard is staged and held."""
        digest, depot, copied = digest_of(shard), self._open(), False
        with self._changed:
            while True:
                if self._stopped:
                    raise _Stopped("the stage is closed")
                if ahead and digest not in self._planned:
                    return "staged"  # there is another plan
                if digest not in self._copying:
                    if depot.hold(shard):
                        if digest not in self._held:
                            self._held[digest] = shard
                            self._progress.add(shard.bytes)
                        return "staged"
                    if self._failure:
                        return "no room"
                    if depot.claim(shard):
                        break
                if ahead:
                    return "busy"
                self._changed.wait(_NAP_S)  # another thread or process copies it
            self._copying.add(digest)
        try:
            copied = self._copy(shard, ahead=ahead)
        finally:
            with self._changed:
                self._copying.remove(digest)
                wanted = digest in self._in_use or digest in self._planned
                if copied and wanted:
                    copied = depot.hold(shard)
                if copied and wanted:
                    self._held[digest] = shard
                else:
                    depot.drop(shard)
                self._changed.notify_all()
        return "staged" if copied else "no room"

    def _copy(self, shard: Shard, *, ahead: bool) -> bool:
        """Copy a claimed shard. Return False if there is no room or the folder fails."""
        depot = self._open()
        try:
            if depot.is_there(shard):
                return True  # another process has just brought it
            with self._changed:  # otherwise `path` could return a file that is being evicted
                # Evict shards that were copied ahead only if there is no other way.
                spare = not ahead and self._origin.folder is None
                keep = self._copying | (self._in_use if spare else self._held.keys())
                made = depot.create(shard, keep)
        except OSError as error:
            self._fail(error)
            return False
        if made is None:
            return False
        descriptor, part = made
        try:
            pour(self._origin, shard, partial(self._write, descriptor))
            depot.commit(shard, descriptor, part)
        except OSError as error:
            depot.discard(descriptor, part)
            self._fail(error)
            return False
        except BaseException:
            depot.discard(descriptor, part)
            raise
        with self._changed:
            self.copied_bytes += shard.bytes
        return True

    def _write(self, descriptor: int, block: memoryview) -> None:
        while block:
            if self._stopped:
                raise _Stopped("the stage is closed")
            count = os.write(descriptor, block)
            block = block[count:]
            self._progress.add(count)

    def _fail(self, error: OSError) -> None:
        """Stop staging in this process: the folder is full, read-only or gone."""
        with self._changed:
            self._failure = self._failure or (error.strerror or str(error))


class _Stopped(RuntimeError):
    """`close` was called."""
