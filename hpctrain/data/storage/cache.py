"""The chunks that were decoded last: one cache a process, bounded in bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import numpy as np

from hpctrain.data.storage.scratch import Bytes
from hpctrain.errors import DataError

MAX_BYTES = 2**30

Load = Callable[[Bytes], None]


class ChunkCache:
    """Buffers by key; the least recently used one gives its memory to the next.

    Fresh memory comes at about 1 GB/s, a page fault at a time, which is slower than what LZ4
    decodes: so a buffer that leaves is filled again, and none is handed out beyond `use`.

    Threads share it. Two that want the same chunk decode it once: the second waits for the
    first. A fork begins with an empty one.

    Args:
        max_bytes: Of all buffers. What is in use at the same time may exceed it.

    Attributes:
        max_bytes: May be changed; counts from the next chunk on.
        nbytes: Of all buffers, now.
        decoded: Chunks that were loaded, so far.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._start()

    def __contains__(self, key: Hashable) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.ready

    @contextmanager
    def use(self, key: Hashable, nbytes: int, load: Load) -> Iterator[Bytes]:
        """Give uint8 (nbytes,), not to be written to; filled by `load` if it is not there."""
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
        """Have `pool` load a chunk, unless it is there; `use` meets the errors."""

        def work() -> None:
            slot = self._take(key)
            try:
                # Nobody waits for the pool's queue: `use` loads what the pool has not begun, and
                # the pool leaves what `use` has begun. So threads of the pool may call it as well.
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
        except RuntimeError:  # it has been shut down
            return

    def _start(self) -> None:
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = self.decoded = 0
        self._pid = os.getpid()

    def _take(self, key: Hashable) -> "_Slot":
        if self._pid != os.getpid():  # forked: a thread of the parent may have held a lock
            self._start()
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
            if not slot.users and not slot.ready:  # its loading failed
                del self._slots[key]

    def _fill(self, slot: "_Slot", nbytes: int, load: Load) -> None:
        """Load a slot, whose lock is held."""
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
        """Take the memory of chunks that leave, or more."""
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
    """A chunk; when not `ready`, one that whoever holds the lock is loading."""

    __slots__ = ("buffer", "lock", "ready", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffer: Bytes = np.empty(0, np.uint8)
        self.ready = False
        self.users = 0


CACHE = ChunkCache()
