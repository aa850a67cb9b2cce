"""Copies of shards on the node that reads them, made once per node, before they are used.

source ── large reads ── xxh3 ── DIGEST.part ── rename ── path() ── mapped by the reader

    >>> stage = Stage("s3://bucket/digits", Path(os.environ["TMPDIR"]))
    >>> stage.plan(shards)                # starts to copy them in threads, in this order
    >>> with open(stage.path(shards[0]), "rb") as file: ...
    >>> stage.close()                     # the last process of the job removes the copies

All processes of a job on a node share one `NodeFolder`. Each shard is copied by one of them, and
several of them copy different shards at the same time. What does not fit is read from the source;
nothing is evicted, because a shard that makes room for another one would be copied once an epoch,
too. A problem with staging is not an error: if there is no room, or the folder fails, shards are
read from the source, and one warning is logged. (A data set at a URL cannot be read in place, so
there the problem is an error.) Wrong bytes are always an error.

The budget counts every byte before it is written, so staging fills neither a disk nor the memory of
a job.
"""

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.addons.node.node_folder import NodeFolder
from hpctrain.base.errors import StorageError
from hpctrain.base.forks import PerProcess
from hpctrain.base.units import readable
from hpctrain.data.places.origin import Origin, digest_of, pour
from hpctrain.data.shards.index import Shard

log = logging.getLogger(__name__)

_TOLD_EVERY_S = 10.0
_THREADS = 4  # shards that a process copies at once; one stream does not fill a network


class Stage(PerProcess):
    """A `Place` whose shards are copied to this node, into the `NodeFolder` of `base`.

    Threads may share a stage. A process leaves no thread and no lock behind, however it ends.
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
        # In a fork, the threads and the locks of what was open are the parent's.
        self._node: NodeFolder | None = None
        self._changed = threading.Condition()  # guards all attributes below
        self._planned: deque[Shard] = deque()  # to copy ahead
        self._copying: list[str] = []
        self._staged: set[str] = set()  # known to be there
        self._threads: list[threading.Thread] = []
        self._progress = _ProgressLog(0)
        self._warned = self._stopped = False
        self._failure = ""  # why nothing more is staged
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
        node = self._open()
        if self._bring(node, shard):
            return node.path(shard)
        if self._origin.folder is None:
            raise StorageError(
                f"{shard.path} cannot be staged in {node.folder}: {self._failure}; and "
                f"{self._origin.name} cannot be read in place"
            )
        with self._changed:
            warned, self._warned = self._warned, True
        if not warned:
            log.warning(
                "staging into %s: %s. From now on what is not staged is read from %s",
                *(node.folder, self._failure, self._origin.name),
            )
        return self._origin.folder / shard.path

    def plan(self, shards: Sequence[Shard]) -> None:
        """Copy these shards ahead, in this order, in place of the earlier plan. Returns at once."""
        with self._changed:
            known = {*self._staged, *self._copying}
            self._planned = deque(s for s in shards if digest_of(s) not in known)
            self._progress = _ProgressLog(sum(shard.bytes for shard in self._planned))
            while self._planned and len(self._threads) < _THREADS:
                name = f"hpctrain-stage-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop copying and let the folder go. The end of the process does the same."""
        atexit.unregister(self.close)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            # A read that hangs because its server is dead must not stop the process from ending.
            idle = self._changed.wait_for(lambda: not self._copying, timeout=5)
        if idle and self._node is not None:
            for thread in self._threads:
                thread.join(timeout=5)
            self._node.close()

    def _open(self) -> NodeFolder:
        """Return the folder, which a fork opens anew."""
        with self._changed:
            if self._stopped:
                raise _Stopped("the stage is closed")
            if self._node is None:
                self._node = NodeFolder(*self._arguments[1:])
            return self._node

    def _work(self) -> None:
        """Copy planned shards."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._planned or self._stopped)
                if self._stopped:
                    return
                shard = self._planned.popleft()
            try:
                self._bring(self._open(), shard)
            except _Stopped:
                return
            except Exception as error:  # a later call of `path` raises it
                log.debug("%s is not staged ahead: %s", shard.path, error)

    def _bring(self, node: NodeFolder, shard: Shard) -> bool:
        """Make sure that a shard is staged. False: there is no room, or the folder has failed."""
        digest, there, problem = digest_of(shard), node.is_there(shard), ""
        if not there and (not self._failure or digest in self._copying):
            with self._changed:
                self._copying.append(digest)
            try:
                there = node.bring(shard, lambda descriptor: self._copy(descriptor, shard))
                budget = readable(node.budget_bytes)
                problem = f"the staging budget of {budget}, or the disk, is full"
            except OSError as error:  # the folder is full, read-only or gone
                problem = error.strerror or str(error)
            finally:
                with self._changed:
                    self._copying.remove(digest)
                    self._changed.notify_all()
        with self._changed:
            if there:
                self._staged.add(digest)
            else:
                self._failure = self._failure or problem
        return there

    def _copy(self, descriptor: int, shard: Shard) -> None:
        """Write the bytes of a shard into an open file, and check them."""

        def write(block: memoryview) -> None:
            while block:
                if self._stopped:
                    raise _Stopped("the stage is closed")
                count = os.write(descriptor, block)
                block = block[count:]
                self._progress.add(count)

        pour(self._origin, shard, write)
        with self._changed:
            self.copied_bytes += shard.bytes


class _Stopped(RuntimeError):
    """`close` was called."""


class _ProgressLog:
    """Counts bytes, from any thread."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._started = self._logged_at = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` more bytes as processed."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._logged_at < _TOLD_EVERY_S:
                return
            self._logged_at = now
        rate = self._done / (now - self._started)
        log.info(
            "staging: %.1f of %.1f GB, %.0f MB/s, %.0f s left",
            *(self._done / 1e9, self._total / 1e9),
            *(rate / 1e6, max(0, self._total - self._done) / max(1.0, rate)),
        )
