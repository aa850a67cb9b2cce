"""A cache of decoded chunks, bounded in bytes. A process has one."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from contextlib import suppress

from hpctrain.base.errors import DataError
from hpctrain.base.forks import PerProcess
from hpctrain.data.shards.types import Array

MAX_BYTES = 2**30

Load = Callable[[], Array]


class ChunkCache(PerProcess):
    """Decoded chunks by key, of about `max_bytes`. The least recently used one is dropped first.

    Nobody writes into them. Threads may share the cache: of two that need the same chunk, the
    second waits. A forked child starts with an empty one.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        super().__init__()

    def _begin(self) -> None:
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = 0

    def get(self, key: Hashable, load: Load) -> Array:
        """Return a chunk; `load` makes it if it is not in the cache."""
        slot = self._slot(key)
        with slot.lock:
            return self._loaded(slot, load)

    def start(self, key: Hashable, load: Load, pool: Executor) -> None:
        """Let `pool` load a chunk that is not in the cache. Errors are raised later, by `get`."""
        slot = self._slots.get(key)
        if slot is None or slot.chunk is None:
            with suppress(RuntimeError):  # the pool has been shut down
                pool.submit(self._ahead, key, load)

    def _ahead(self, key: Hashable, load: Load) -> None:
        slot = self._slot(key)
        # Nobody waits for the queue of the pool: `get` loads a chunk that the pool has not started,
        # and the pool skips a chunk that `get` has started.
        if slot.lock.acquire(blocking=False):
            try:
                self._loaded(slot, load)
            except DataError:
                pass
            finally:
                slot.lock.release()

    def _slot(self, key: Hashable) -> "_Slot":
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            return slot

    def _loaded(self, slot: "_Slot", load: Load) -> Array:
        """Return the chunk of a slot, whose lock the caller holds."""
        if slot.chunk is None:
            slot.chunk = load()
            with self._lock:
                self._nbytes += slot.chunk.nbytes
                while self._nbytes > self.max_bytes and (found := self._oldest(slot)):
                    key, nbytes = found
                    del self._slots[key]
                    self._nbytes -= nbytes
        return slot.chunk

    def _oldest(self, but: "_Slot") -> tuple[Hashable, int] | None:
        for key, slot in self._slots.items():
            if slot.chunk is not None and slot is not but:
                return key, slot.chunk.nbytes
        return None


class _Slot:
    """A chunk. While there is none, the thread that holds the lock loads it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chunk: Array | None = None


CACHE = ChunkCache()
