"""The open shards of a process: mapped side by side, and read together.

Every read is a *span*: `length` elements of a dataset, beginning at element `start`. A sample of a
fixed-size field is a span of 1, its place in a variable-length field is a span of 2 of the offsets,
and a window of tokens is a span of the values. The spans of a batch, from any shards, are read by
one gather (see `hpctrain.data.sources.arena`), except those of datasets that cannot be mapped.
"""

import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd, prod
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch

from hpctrain.data.places.filesystem import Kind, kind_of
from hpctrain.data.places.placement import Place
from hpctrain.data.sources.arena import WORDS, Addresses, Arena
from hpctrain.data.sources.watch import Watch
from hpctrain.errors import DataError
from hpctrain.shards.field import Field
from hpctrain.shards.index import Shard
from hpctrain.shards.storage.chunks import Chunked
from hpctrain.shards.storage.layout import Layout
from hpctrain.shards.storage.plain import Plain
from hpctrain.shards.storage.stamp import Stamp
from hpctrain.shards.types import Array, Int64s

T = TypeVar("T")
IO = Literal["auto", "mmap", "read"]

SHORT = 16  # elements; shorter spans of an unmapped dataset are read row by row, in one call


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
        self._kinds: dict[Path, Kind] = {}
        elements = dict(_elements(fields))
        self._elements = {
            name: np.dtype(type_).itemsize * prod(shape)
            for name, (type_, shape) in elements.items()
        }
        self._types = elements
        files = len(shards)
        # For each dataset and shard: the address of element 0 (-1: not mapped), and the number of
        # elements.
        self._bases = {name: np.full(files, -1, np.int64) for name in self._elements}
        self._totals = {name: np.zeros(files, np.int64) for name in self._elements}
        # Word size per dataset: it divides the size and the address of every mapped element.
        self._words = {name: gcd(size, max(WORDS)) or 1 for name, size in self._elements.items()}
        self._open = np.zeros(files, np.bool_)
        self._layouts: dict[int, Layout] = {}
        self._slots: dict[int, int] = {}
        # A shard that nobody holds may be closed; the least recently used one is closed first.
        self._users = np.zeros(files, np.int64)
        self._used = np.zeros(files, np.int64)
        self._clock = 0
        self._changed = threading.Condition()
        self._arena = Arena(files, max(shard.bytes for shard in shards))
        self._free = list(range(self._arena.slots - 1, -1, -1))
        # A shard that is not mapped keeps a file descriptor, and a process has few of them.
        self._unmapped: set[int] = set()
        self._max_files = _max_files()
        self._all_mapped = True  # among the shards opened so far
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
        slots = self._arena.slots
        # Before the first shard is open, it is unknown how they are stored.
        mapped = self._all_mapped and self._layouts
        return slots if mapped else min(slots, self._max_files)

    def path(self, shard: int) -> Path:
        """Return the file of a held shard, for messages."""
        return self._layouts[shard].path

    def chunk_rows(self, shard: int) -> int:
        """Return how many samples a held shard stores, and reads, together."""
        return max((rows.chunk_rows for rows in self._layouts[shard].rows.values()), default=1)

    def totals(self, name: str, shards: Int64s) -> Int64s:
        """Return the number of elements of a dataset in each of the held `shards`, int64 (n,)."""
        found: Int64s = self._totals[name][shards]
        return found

    def spans(self, name: str, shards: Int64s, starts: Int64s, length: int, out: Array) -> None:
        """Read n spans of the same length, from n held `shards` at n `starts`, into `out`.

        `name` is FIELD, FIELD/offsets or FIELD/values. Each span ends within the dataset. `out` is
        contiguous, of any dtype and shape, and is filled with the bytes.
        """
        if not out.nbytes:
            return
        if self._all_mapped:
            self.gather(self.addresses(name, shards, starts), out)
            return
        rows = torch.from_numpy(out.reshape(-1).view(np.uint8)).view(len(starts), -1)
        mapped = self._bases[name][shards] >= 0
        if mapped.any():
            found = np.empty((int(mapped.sum()), rows.shape[1]), np.uint8)
            self.gather(self.addresses(name, shards[mapped], starts[mapped]), found)
            rows[torch.from_numpy(mapped)] = torch.from_numpy(found)
        dtype, shape = self._types[name]
        for shard in np.unique(shards[~mapped]).tolist():
            here = np.flatnonzero(shards == shard)
            spans = np.empty((len(here), length, *shape), dtype)
            _read(self._layouts[shard].rows[name], starts[here], length, spans)
            flat = torch.from_numpy(spans.reshape(-1).view(np.uint8))
            rows[torch.from_numpy(here)] = flat.view(len(here), -1)

    def addresses(self, name: str, shards: Int64s, starts: Int64s) -> Addresses:
        """Return where n spans begin, for `gather`. Their shards are held and mapped."""
        found: Int64s = starts * self._elements[name]
        found += self._bases[name][shards]
        return Addresses.of(found, self._words[name])

    def gather(self, addresses: Addresses, out: Array) -> None:
        """Read mapped spans, as `spans` does, given their addresses."""
        self._arena.gather(addresses, out)

    def runs(self, name: str, shards: Int64s, starts: Int64s, ends: Int64s, out: Array) -> None:
        """Read spans of FIELD/values of different lengths, end to end, into `out` (total, *shape).

        `ends`, int64 (n,), says where each span ends in it.
        """
        lengths = np.diff(ends, prepend=0)
        longest = int(lengths.max(initial=0))
        padded = len(starts) * longest
        fits = starts + longest <= self._totals[name][shards]
        if fits.all() and padded <= 4 * len(out) and (self._bases[name][shards] >= 0).all():
            spans = np.empty((len(starts), longest, *out.shape[1:]), out.dtype)
            self.spans(name, shards, starts, longest, spans)
            out[:] = spans[np.arange(longest) < lengths[:, None]]
            return
        for i in range(len(starts)):  # few and long, or not mapped
            run = out[ends[i] - lengths[i] : ends[i]]
            if len(run):
                self.spans(name, shards[i : i + 1], starts[i : i + 1], len(run), run)

    def will_need(self, name: str, shard: int, start: int, stop: int) -> None:
        """Start to read the elements from `start` to `stop` of a dataset. The shard is held."""
        base, element = int(self._bases[name][shard]), self._elements[name]
        if base >= 0:
            self._arena.will_need(base + start * element, (stop - start) * element)
        else:
            self._layouts[shard].rows[name].prefetch(np.arange(start, stop))

    def _unchanged(self, shards: Int64s) -> bool:
        """Return whether no held shard was touched since it was opened."""
        touched = self._watch.touched(shards)
        for shard in touched:
            with self._admitting:
                if self._watch.touched(np.array([shard])):  # no other thread was faster
                    path = self._layouts[shard].path
                    stamp = self._watch.admit_again(shard)
                    # The mapping stays. Other readers know the file by the time of its last write.
                    self._layouts[shard] = self._layout(shard, path, stamp)
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
        if layout.stamp.file != stamp.file:
            raise DataError(f"shard {path} was replaced while it was being opened")
        return layout

    def _open_one(self, shard: int, path: Path, stamp: Stamp) -> None:
        if len(self._layouts) >= self._arena.slots:
            self._close_one_of(np.flatnonzero(self._open))
        layout = self._layout(shard, path, stamp)
        if layout.rows:
            self._all_mapped = False
            if len(self._unmapped) >= self._max_files:
                self._close_one_of(np.array(sorted(self._unmapped)))
            self._unmapped.add(shard)
        if layout.offsets:
            slot = self._free[-1]
            self._map(layout, slot)
            self._slots[shard] = self._free.pop()
            for name, offset in layout.offsets.items():
                self._words[name] = gcd(self._words[name], offset)
                self._bases[name][shard] = slot * self._arena.slot_bytes + offset
        for name, total in layout.totals.items():
            self._totals[name][shard] = total
        self._layouts[shard] = layout
        self._open[shard] = True

    def _map(self, layout: Layout, slot: int) -> None:
        """Map the file of a shard into a slot; it must still be the file that was opened."""
        try:
            descriptor = os.open(layout.path, os.O_RDONLY)
            try:
                stamp = Stamp.of(os.fstat(descriptor))
                self._arena.map(slot, descriptor, layout.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"shard {layout.path} cannot be mapped: {error.strerror}") from None
        if stamp.file != layout.stamp.file:
            raise DataError(f"shard {layout.path} was replaced while it was being opened")

    def _close_one_of(self, shards: Int64s) -> None:
        """Close the least recently used of these shards that nobody holds."""
        idle = shards[self._users[shards] == 0]
        if len(idle):
            self._close(int(idle[np.argmin(self._used[idle])]))

    def _close(self, shard: int) -> None:
        del self._layouts[shard]
        self._unmapped.discard(shard)
        self._open[shard] = False
        for bases in self._bases.values():
            bases[shard] = -1
        if shard in self._slots:
            self._free.append(self._slots.pop(shard))
        self._place.release(self._shards[shard])


def _elements(fields: Mapping[str, Field]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the datasets of the fields, with dtype and shape of one element."""
    for name, field in fields.items():
        if field.variable:
            yield f"{name}/offsets", ("int64", ())
            yield f"{name}/values", (field.dtype, field.shape)
        else:
            yield name, (field.dtype, field.shape)


def _max_files() -> int:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, descriptors // 4) if descriptors > 0 else 4096  # -1: no limit


def _read(dataset: Chunked | Plain, starts: Int64s, length: int, out: Array) -> None:
    """Fill `out`, (n, length, *shape)."""
    if length <= SHORT:
        out[:] = dataset.rows((starts[:, None] + np.arange(length)).reshape(-1)).reshape(out.shape)
        return
    for row, start in enumerate(starts.tolist()):
        dataset.copy(start, start + length, out[row])
