"""A cache of decoded chunks, bounded in bytes. A process has one."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import numpy as np

from hpctrain.errors import DataError
from hpctrain.shards.per_process import PerProcess
from hpctrain.shards.storage.scratch import Bytes

MAX_BYTES = 2**30

Load = Callable[[Bytes], None]


class ChunkCache(PerProcess):
    """Decoded chunks by key. The least recently used one is removed, and its buffer reused.

    Fresh memory costs a page fault per page, so it is filled at about 1 GB/s, which is slower than
    LZ4 decodes. Therefore no buffer is used outside `use`.

    Threads may share the cache: of two that need the same chunk, the second waits. A forked child
    starts with an empty one. Chunks that are in use at the same time may exceed `max_bytes`.
    `nbytes` are those of all buffers now, and `decoded` counts the loaded chunks.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        super().__init__()

    def __contains__(self, key: Hashable) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.ready

    @contextmanager
    def use(self, key: Hashable, nbytes: int, load: Load) -> Iterator[Bytes]:
        """Yield the buffer of a chunk, uint8 (nbytes,), read-only; `load` fills it if necessary."""
        slot = self._take(key)
        try:
            if not slot.ready:
                with slot.lock:
                    if not slot.ready:
                        self._fill(slot, nbytes, load)
            yield slot.buffer
        finally:
            self._leave(key, slot)

    def start(self, key: Hashable, nbytes: int, load: Load, pool: Executor) -> None:
        """Let `pool` load a chunk that is not in the cache. Errors are raised later, by `use`."""

        def work() -> None:
            slot = self._take(key)
            try:
                # Nobody waits for the queue of the pool: `use` loads a chunk that the pool has not
                # started, and the pool skips a chunk that `use` has started. Therefore a thread
                # of the pool may call `use` too.
                if not slot.ready and slot.lock.acquire(blocking=False):
                    try:
                        if not slot.ready:
                            self._fill(slot, nbytes, load)
                    except DataError:
                        pass
                    finally:
                        slot.lock.release()
            finally:
                self._leave(key, slot)

        if key in self:
            return
        try:
            pool.submit(work)
        except RuntimeError:  # the pool has been shut down
            return

    def _begin(self) -> None:
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = self.decoded = 0

    def _take(self, key: Hashable) -> "_Slot":
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot()
            self._slots.move_to_end(key)
            slot.users += 1
            return slot

    def _leave(self, key: Hashable, slot: "_Slot") -> None:
        with self._lock:
            slot.users -= 1
            if not slot.users and not slot.ready:  # the loading has failed
                del self._slots[key]

    def _fill(self, slot: "_Slot", nbytes: int, load: Load) -> None:
        """Load a slot. The caller holds the lock of the slot."""
        try:
            buffer = self._buffer(nbytes)
            load(buffer)
        except BaseException:
            with self._lock:
                self.nbytes -= nbytes
            raise
        with self._lock:
            self.decoded += 1
            slot.buffer, slot.ready = buffer, True

    def _buffer(self, nbytes: int) -> Bytes:
        """Return a buffer: one of a chunk that is removed, or new memory."""
        buffer = None
        with self._lock:
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                idle = (k for k, s in self._slots.items() if s.ready and not s.users)
                oldest = next(idle, None)
                if oldest is None:
                    break
                left = self._slots.pop(oldest).buffer
                self.nbytes -= len(left)
                if len(left) == nbytes:
                    buffer = left
        return buffer if buffer is not None else np.empty(nbytes, np.uint8)


class _Slot:
    """A chunk. While it is not `ready`, the thread that holds the lock loads it."""

    __slots__ = ("buffer", "lock", "ready", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffer: Bytes = np.empty(0, np.uint8)
        self.ready = False
        self.users = 0


CACHE = ChunkCache()
