"""The threads of one process that copy shards from an origin into this node's depot.

    plan ── queue ── threads ──┐
                               ├── one thread per shard: held? ── copy ── held
    path ──────────────────────┘        │ no room, or the depot fails
                                        └── the file of the origin

A shard that was given to `plan` or `path` is "held" until it is released: it is staged, and a lock
of this process keeps it from eviction.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from hpctrain.data.places.depot import Depot
from hpctrain.data.places.origin import Origin, WrongShard, digest_of, pour
from hpctrain.data.places.progress_log import Progress
from hpctrain.errors import StorageError
from hpctrain.shards.index import Shard
from hpctrain.units import readable

log = logging.getLogger(__name__)

_NAP_S = 0.05  # pause while another process copies a shard
_FULL_S = 5.0  # pause before looking for room again
_WARN_S = 60.0  # pause between two warnings about a long wait

_State = Literal["staged", "busy", "no room"]


class Copier:
    """The part of a `Stage` that belongs to one process, with `threads` that copy ahead."""

    def __init__(self, origin: Origin, depot: Depot, threads: int) -> None:
        self.depot, self.copied_bytes = depot, 0
        self._origin, self._wanted_threads = origin, threads
        self._changed = threading.Condition()  # guards all attributes below
        self._locks: dict[str, threading.Lock] = {}  # one per shard: one thread works on it
        self._planned: dict[str, Shard] = {}
        self._in_use: set[str] = set()  # given out by `path`, not yet released
        self._queue: OrderedDict[str, Shard] = OrderedDict()  # planned, not yet started
        self._copying: set[str] = set()
        self._held: dict[str, Shard] = {}  # staged, and locked against eviction
        self._threads: list[threading.Thread] = []
        self._progress = Progress("staging", 0)
        self._full = self._warned = self._stopped = False
        self._failure = ""

    def path(self, shard: Shard) -> Path:
        """See `Stage.path`."""
        with self._changed:
            self._in_use.add(digest_of(shard))
        with self._lock(shard):
            state = self._obtain(shard, ahead=False)
        if state == "staged":
            return self.depot.path(shard)
        reason = self._failure or (
            f"the staging budget of {readable(self.depot.budget_bytes)}, or the disk, is full "
            "of shards in use"
        )
        self.release(shard)
        if self._origin.folder is None:
            raise StorageError(
                f"{shard.path} cannot be staged in {self.depot.folder}: {reason}; and "
                f"{self._origin.name} cannot be read in place"
            )
        self._warn(reason)
        return self._origin.folder / shard.path

    def plan(self, shards: Sequence[Shard]) -> None:
        """See `Stage.plan`."""
        with self._changed:
            self._planned = {digest_of(shard): shard for shard in shards}
            for digest in self._held.keys() - self._planned.keys() - self._in_use:
                self.depot.drop(self._held.pop(digest))
            self._queue = OrderedDict(
                (digest, shard)
                for digest, shard in self._planned.items()
                if digest not in self._held
            )
            self._progress = Progress("staging", sum(s.bytes for s in self._queue.values()))
            while self._queue and len(self._threads) < self._wanted_threads:
                name = f"hpctrain-stage-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._full = False
            self._changed.notify_all()

    def release(self, shard: Shard) -> None:
        """See `Stage.release`."""
        digest = digest_of(shard)
        with self._changed:
            self._in_use.discard(digest)
            self._planned.pop(digest, None)
            self._queue.pop(digest, None)
            if self._held.pop(digest, None):
                self.depot.drop(shard)
            self._full = False
            self._changed.notify_all()

    def stop(self) -> None:
        """See `Stage.close`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            # A read that hangs because its server is dead must not stop the process from ending.
            idle = self._changed.wait_for(lambda: not self._copying, timeout=5)
        if idle:
            for thread in self._threads:
                thread.join(timeout=5)
            self.depot.close()

    def _work(self) -> None:
        """Copy planned shards for as long as there is room."""
        while (shard := self._next()) is not None:
            lock = self._lock(shard)
            if not lock.acquire(blocking=False):
                continue  # a call of `path` is working on it
            try:
                state = self._obtain(shard, ahead=True)
            except _Stopped:
                return
            except Exception as error:  # a later call of `path` raises it
                log.debug("%s is not staged ahead: %s", shard.path, error)
                continue
            finally:
                lock.release()
            digest = digest_of(shard)
            with self._changed:
                if state == "staged" or digest not in self._planned:
                    continue
                self._queue[digest] = shard
                if state == "busy":  # work on other shards first
                    self._changed.wait(_NAP_S)
                else:
                    self._queue.move_to_end(digest, last=False)
                    self._full = True

    def _next(self) -> Shard | None:
        with self._changed:
            while not self._stopped and (self._full or not self._queue):
                # Wait until a shard is released or planned here. Another process may also
                # have made room, so try again from time to time.
                if not self._changed.wait(_FULL_S if self._full else None):
                    self._full = False
            return None if self._stopped else self._queue.popitem(last=False)[1]

    def _obtain(self, shard: Shard, *, ahead: bool) -> _State:
        """Make sure that a shard is staged and held."""
        digest, warned_at = digest_of(shard), time.monotonic()
        while True:
            with self._changed:
                if self._stopped:
                    raise _Stopped("the stage is closed")
                if ahead and digest not in self._planned:
                    return "staged"  # the shard was released in the meantime
                if self.depot.hold(shard):
                    if digest not in self._held:
                        self._held[digest] = shard
                        self._progress.add(shard.bytes)
                    return "staged"
                if self._failure:
                    return "no room"
                if self.depot.claim(shard):
                    self._copying.add(digest)
                    break
            if ahead:
                return "busy"
            time.sleep(_NAP_S)
            if time.monotonic() - warned_at > _WARN_S:
                warned_at = time.monotonic()
                log.warning("%s: another process of this node still copies it", shard.path)
        copied = False
        try:
            copied = self._copy(shard, ahead=ahead)
        finally:
            with self._changed:
                self._copying.remove(digest)
                wanted = digest in self._in_use or digest in self._planned
                if copied and wanted:
                    copied = self.depot.hold(shard)
                if copied and wanted:
                    self._held[digest] = shard
                else:
                    self.depot.drop(shard)
                self._changed.notify_all()
        return "staged" if copied else "no room"

    def _copy(self, shard: Shard, *, ahead: bool) -> bool:
        """Copy a claimed shard. Return False if there is no room or the folder fails."""
        try:
            if self.depot.is_there(shard):
                return True  # another process has just brought it
            with self._changed:  # otherwise `path` could return a file that is being evicted
                # Evict shards that were copied ahead only if there is no other way.
                spare = not ahead and self._origin.folder is None
                keep = self._copying | (self._in_use if spare else self._held.keys())
                made = self.depot.create(shard, keep)
        except OSError as error:
            self._fail(error)
            return False
        if made is None:
            return False
        descriptor, part = made
        try:
            self._fill(shard, descriptor)
            self.depot.commit(shard, descriptor, part)
        except OSError as error:
            self.depot.discard(descriptor, part)
            self._fail(error)
            return False
        except BaseException:
            self.depot.discard(descriptor, part)
            raise
        with self._changed:
            self.copied_bytes += shard.bytes
        return True

    def _fill(self, shard: Shard, descriptor: int) -> None:
        for again in (True, False):
            os.lseek(descriptor, 0, os.SEEK_SET)
            try:
                return pour(self._origin, shard, partial(self._write, descriptor))
            except WrongShard as error:
                if not again:
                    raise
                log.warning("%s; read once more", error)
            finally:
                # Only the copy will be read, so do not keep the source in the page cache too.
                self._origin.forget(shard.path)

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

    def _warn(self, reason: str) -> None:
        with self._changed:
            warned, self._warned = self._warned, True
        if not warned:
            log.warning(
                "staging into %s: %s. From now on what is not staged is read from %s",
                *(self.depot.folder, reason, self._origin.name),
            )

    def _lock(self, shard: Shard) -> threading.Lock:
        return self._locks.setdefault(digest_of(shard), threading.Lock())


class _Stopped(RuntimeError):
    """`close` was called."""
