"""The chunks that were decoded last: one cache a process, bounded in bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor

from hpctrain.data.ragged import Array
from hpctrain.errors import DataError

MAX_BYTES = 2**30


class ChunkCache:
    """Arrays by key, the least recently used ones leave first; a fork begins with an empty one.

    Threads share it. Two that want the same chunk decode it once: the second waits for the first.

    Args:
        max_bytes: Of what it keeps. A chunk larger than that is kept alone.

    Attributes:
        max_bytes: May be changed; counts from the next chunk on.
        nbytes: Kept now.
        decoded: Arrays that were made, so far.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._start()

    def __contains__(self, key: Hashable) -> bool:
        slot = self._slots.get(key)
        return slot is not None and slot.array is not None

    def get(self, key: Hashable, load: Callable[[], Array]) -> Array:
        """Return the array of `key`, not to be written to; made by `load` if it is not there."""
        slot = self._slot(key)
        if slot.array is None:
            with slot.lock:
                if slot.array is None:
                    self._load(key, slot, load)
        assert slot.array is not None
        return slot.array

    def start(self, key: Hashable, load: Callable[[], Array], pool: Executor) -> None:
        """Have `pool` make the array of `key`, unless it is there; `get` meets the errors."""

        def work() -> None:
            slot = self._slot(key)
            # Nobody waits for the pool's queue: `get` makes what the pool has not begun, and the
            # pool leaves what `get` has begun. So threads of the pool may call `get` as well.
            if slot.array is None and slot.lock.acquire(blocking=False):
                try:
                    if slot.array is None:
                        self._load(key, slot, load)
                except DataError:
                    pass
                finally:
                    slot.lock.release()

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

    def _slot(self, key: Hashable) -> "_Slot":
        if self._pid != os.getpid():  # forked: a thread of the parent may have held a lock
            self._start()
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot()
            self._slots.move_to_end(key)
            return slot

    def _load(self, key: Hashable, slot: "_Slot", load: Callable[[], Array]) -> None:
        """Fill a slot, whose lock is held, and make room."""
        try:
            array = load()
        except BaseException:
            with self._lock:
                self._slots.pop(key, None)
            raise
        array.flags.writeable = False
        with self._lock:
            self._drop(key)  # that of another thread, where this one came after an error
            slot.array = array
            self._slots[key] = slot
            self.nbytes += array.nbytes
            self.decoded += 1
            while self.nbytes > self.max_bytes:
                # Those without an array are being made.
                full = (k for k, s in self._slots.items() if s.array is not None and s is not slot)
                oldest = next(full, None)
                if oldest is None:
                    return
                self._drop(oldest)

    def _drop(self, key: Hashable) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None and slot.array is not None:
            self.nbytes -= slot.array.nbytes


class _Slot:
    """A chunk, or one that is being made by whoever holds the lock."""

    __slots__ = ("array", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.array: Array | None = None


CACHE = ChunkCache()
