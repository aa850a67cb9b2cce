"""The open shards of a process: opened when they are needed, as many as there is room for.

A read holds its shards, and what it returns was read from unchanged files (see `Watch`). A shard
that nobody holds may be closed to make room; the least recently used one is closed first.
"""

import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from hpctrain.data.places.placement import Place
from hpctrain.data.sources.datasets import Datasets
from hpctrain.data.sources.watch import Watch
from hpctrain.errors import DataError
from hpctrain.mounts import Kind, kind_of
from hpctrain.shards.field import Field
from hpctrain.shards.index import Shard
from hpctrain.shards.storage.layout import Layout
from hpctrain.shards.storage.stamp import Stamp
from hpctrain.shards.types import Int64s

T = TypeVar("T")
IO = Literal["auto", "mmap", "read"]


class OpenShards:
    """Shards that are opened when they are first needed. Threads may share them, processes not.

    A shard is known by its number in `shards`. `io` says how uncompressed, contiguous data is read:
    "mmap", "read", or "auto", which is "read" on network file systems. `Watch` explains `since_ns`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        place: Place,
        fields: Mapping[str, Field],
        io: IO,
        since_ns: int,
    ) -> None:
        self._shards, self._place, self._fields, self._io = shards, place, fields, io
        self.datasets = Datasets(shards, fields)
        self._kinds: dict[Path, Kind] = {}
        files = len(shards)
        self._open = np.zeros(files, np.bool_)
        self._users = np.zeros(files, np.int64)
        self._used = np.zeros(files, np.int64)
        self._clock = 0
        self._changed = threading.Condition()
        # A shard that is not mapped keeps a file descriptor, and a process has few of them.
        self._unmapped: set[int] = set()
        self._max_files = _max_files()
        self._watch = Watch(shards, since_ns)
        self._admitting = threading.Lock()
        self._admitted_again = 0  # how often an open shard was touched, and was still right

    def read(self, shards: Int64s, action: Callable[[], T]) -> T:
        """Call `action`, which reads from `shards`, int64 (n,), and return what it returns.

        If a file was touched meanwhile, it is called again; if one was changed, that is a
        DataError.
        """
        while True:
            with self.held(shards):
                before = self._admitted_again
                try:
                    found = action()
                except DataError:  # perhaps what is damaged has just been written
                    if self._unchanged(shards):
                        raise
                    continue
                # Another thread may have seen it first.
                if self._unchanged(shards) and self._admitted_again == before:
                    return found

    @contextmanager
    def held(self, shards: Int64s) -> Iterator[None]:
        """Open `shards`, int64 (n,), and keep them open until the context ends."""
        # If all shards fit, none is ever closed, and nothing has to be counted.
        if self._limit >= len(self._shards) and self._open[shards].all():
            yield
            return
        needed = np.unique(shards)
        with self._changed:
            self._changed.wait_for(lambda: self._room_for(needed))
            self._users[needed] += 1
            self._clock += 1
            self._used[needed] = self._clock
        try:
            missing = needed[~self._open[needed]].tolist()
            # Outside the lock, because it may wait for a copy.
            paths = [self._place.path(self._shards[shard]) for shard in missing]
            stamps = [self._watch.admit(*each) for each in zip(missing, paths, strict=True)]
            with self._changed:
                for shard, path, stamp in zip(missing, paths, stamps, strict=True):
                    if not self._open[shard]:
                        self._open_one(shard, path, stamp)
            yield
        finally:
            with self._changed:
                self._users[needed] -= 1
                self._changed.notify_all()

    @property
    def at_once(self) -> int:
        """How many spans of different shards one of several threads may hold at the same time."""
        return 2**62 if self._limit >= len(self._shards) else max(1, self._limit // 8)

    @property
    def _limit(self) -> int:
        """How many shards may be open at the same time."""
        slots = self.datasets.slots
        # Before the first shard is open, it is unknown how they are stored.
        mapped = self.datasets.all_mapped and self.datasets.layouts
        return slots if mapped else min(slots, self._max_files)

    def path(self, shard: int) -> Path:
        """Return the file of a held shard, for messages."""
        return self.datasets.layouts[shard].path

    def _unchanged(self, shards: Int64s) -> bool:
        """Return whether no held shard was touched since it was opened."""
        touched = self._watch.touched(shards)
        for shard in touched:
            with self._admitting:
                if self._watch.touched(np.array([shard])):  # no other thread was faster
                    path = self.path(shard)
                    stamp = self._watch.admit_again(shard)
                    # The mapping stays. Other readers know the file by the time of its last write.
                    self.datasets.layouts[shard] = self._layout(shard, path, stamp)
                    self._admitted_again += 1
        return not touched

    # Opening and closing. The caller holds the lock.

    def _maps(self, path: Path) -> bool:
        if self._io != "auto":
            return self._io == "mmap"
        folder = path.parent
        if folder not in self._kinds:
            self._kinds[folder] = kind_of(folder)
        return self._kinds[folder] != "network"

    def _room_for(self, needed: Int64s) -> bool:
        others = np.count_nonzero(self._users) - np.count_nonzero(self._users[needed])
        return not others or int(others) + len(needed) <= self._limit

    def _layout(self, shard: int, path: Path, stamp: Stamp) -> Layout:
        layout = Layout(path, self._shards[shard], self._fields, mapped=self._maps(path))
        layout.check_is(stamp)
        return layout

    def _open_one(self, shard: int, path: Path, stamp: Stamp) -> None:
        if len(self.datasets.layouts) >= self.datasets.slots:
            self._close_one_of(np.flatnonzero(self._open))
        layout = self._layout(shard, path, stamp)
        if layout.rows:
            if len(self._unmapped) >= self._max_files:
                self._close_one_of(np.array(sorted(self._unmapped)))
            self._unmapped.add(shard)
        self.datasets.add(shard, layout)
        self._open[shard] = True

    def _close_one_of(self, shards: Int64s) -> None:
        """Close the least recently used of these shards that nobody holds."""
        idle = shards[self._users[shards] == 0]
        if len(idle):
            shard = int(idle[np.argmin(self._used[idle])])
            self.datasets.remove(shard)
            self._unmapped.discard(shard)
            self._open[shard] = False
            self._place.release(self._shards[shard])


def _max_files() -> int:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, descriptors // 4) if descriptors > 0 else 4096  # -1: no limit
