"""Read rows of an HDF5 dataset that is stored in chunks, compressed or not, without HDF5.

HDF5 decodes one chunk at a time, under one lock, and decodes it again for every later row. Here the
table of chunks is read from the file once. After that, bytes are read by `preadv` and decoded by
`codecs` in as many threads as there are callers. Decoded chunks stay in one cache of the process,
so an order that goes through the file in blocks decodes each chunk once per epoch:

    rows ──► which chunks ──► in the cache? ──► gather
                  └── no: preadv ── codecs ──► cache       by the caller, or by the pool
                  (`prefetch`)

    >>> chunked = Chunked(file["image"], path, pool=ThreadPoolExecutor(2))
    >>> chunked.prefetch(np.arange(512, 1024))
    >>> chunked.rows(np.array([600, 513, 600])).shape
    (3, 3, 64, 64)

Other datasets are read by h5py under a lock: if `codecs` does not know a filter, chunk by chunk
into the same cache; if there are no chunks (virtual, external), by selection.
"""

import itertools
import logging
import math
import os
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.errors import DataError
from hpctrain.shards.compression import plugins
from hpctrain.shards.storage.cache import CACHE, ChunkCache, Load
from hpctrain.shards.storage.chunk_table import ChunkTable, Grid, filters, samples_first
from hpctrain.shards.storage.codecs import describe
from hpctrain.shards.storage.file import patiently, reading
from hpctrain.shards.storage.scratch import Bytes, Damaged, Undecodable
from hpctrain.shards.types import Array, Int64s

_Visit = tuple[int, Any, Any]  # chunk number, rows of the result, rows of the chunk

log = logging.getLogger(__name__)


def decoders() -> Executor:
    """Return the threads of this process for decoding: as many as the cores it may use."""
    return _decoders(os.getpid())


@lru_cache(maxsize=1)
def _decoders(pid: int) -> Executor:  # a fork does not have its parent's threads
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "hpctrain-decoder")


class Chunked:
    """One dataset that is chunked, compressed or stored in another unusual way.

    Threads may share it. A forked child must drop it and open the dataset again. Its file may be
    closed afterwards if it is `direct`, read without HDF5. `shape` has the samples
    first, whichever axis counts them. `chunk_rows` is the samples in a chunk, 1 if there are no
    chunks, and `chunk_bytes` their decoded bytes. Without a pool, chunks are decoded when they are
    needed.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        path: Path,
        *,
        pool: Executor | None = None,
        cache: ChunkCache = CACHE,
        axis: int = 0,
    ) -> None:
        self.path, self.name, self._axis = path, dataset.name.lstrip("/"), axis
        self.shape: tuple[int, ...] = samples_first(dataset.shape, axis)
        self.dtype: np.dtype[Any] = dataset.dtype
        self._pool, self._cache = pool, cache
        self._lock = threading.Lock()
        self._dataset: h5py.Dataset | None = None
        self._stored: ChunkTable | None = None
        self._chunks: tuple[int, ...] | None = dataset.chunks
        try:
            self._stored = ChunkTable(dataset, path)
        except Undecodable as reason:
            _check_filters(dataset, path)
            if self._chunks:
                _warn_once(f"{path.parent}: {self.name!r} is decoded by HDF5, slowly: {reason}")
            self._dataset = dataset
        except Damaged as error:
            raise DataError(f"shard {path}: {self.name!r} is damaged: {error}") from None
        self.direct = self._stored is not None
        self._grid = Grid(dataset.shape, self._chunks or dataset.shape, axis)
        self._tiles = self._grid.tiles
        self.chunk_rows = self._grid.rows if self._chunks else 1
        self._chunk_bytes = math.prod(self._chunks or (1, *self.shape[1:])) * self.dtype.itemsize
        self.chunk_bytes = len(self._tiles) * self._chunk_bytes
        self._reading = partial(reading, path, self.name)
        status = os.stat(path)  # a new file of the same name has another key
        self._key = (status.st_dev, status.st_ino, status.st_mtime_ns, self.name)

    def rows(self, rows: Int64s, out: Array | None = None) -> Array:
        """Return the samples `rows`, (n,) with repeats allowed, in `out` or in a new array.

        `out` is (n, *shape[1:]), C-contiguous.
        """
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if self._chunks is None:
            if not len(rows):
                return out
            unique, inverse = np.unique(rows, return_inverse=True)  # h5py requires ascending rows
            found = np.empty((len(unique), *self.shape[1:]), self.dtype)
            self._select(unique, found)
            return found.take(inverse, axis=0, out=out, mode="clip")
        visits = self._visits(rows)
        self._ahead(visits[1:])
        for number, where, local in visits:
            for tile, inside, used in self._tiles:
                with self._chunk(number, tile) as chunk:
                    out[where, *inside] = chunk[local, *used]
        return out

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy the samples from `start` to `stop` into `out`, (stop - start, *shape[1:])."""
        if self._chunks is None:
            self._select(slice(start, stop), out)
            return
        size = self.chunk_rows
        numbers = range(start // size, -(-stop // size))
        for number, (tile, _, _) in itertools.product(numbers[1:], self._tiles):
            self._start(number, tile)
        for number, (tile, inside, used) in itertools.product(numbers, self._tiles):
            first = number * size
            begin, end = max(start, first), min(stop, first + size)
            here, there = slice(begin - start, end - start), slice(begin - first, end - first)
            with self._chunk(number, tile) as chunk:
                out[here, *inside] = chunk[there, *used]

    def prefetch(self, rows: Int64s) -> None:
        """Let the pool decode the chunks of samples that will be read soon. Returns at once."""
        if self._chunks is not None:  # at most half a cache, so that chunks in use stay there
            room = self._cache.max_bytes // 2 // max(1, self.chunk_bytes)
            self._ahead(self._visits(rows)[:room])

    def _visits(self, rows: Int64s) -> list[_Visit]:
        numbers, local = np.divmod(rows, self.chunk_rows)
        if not len(rows):
            return []
        if (numbers == numbers[0]).all():
            return [(int(numbers[0]), slice(None), local)]
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        return [(int(numbers[part[0]]), part, local[part]) for part in parts]

    def _ahead(self, visits: list[_Visit]) -> None:
        for (number, _, _), (tile, _, _) in itertools.product(visits, self._tiles):
            self._start(number, tile)

    def _start(self, number: int, tile: int) -> None:
        if self._pool is not None:
            self._cache.start(*self._request(number, tile), self._pool)

    @contextmanager
    def _chunk(self, number: int, tile: int) -> Iterator[Array]:
        with self._cache.use(*self._request(number, tile)) as buffer:
            yield self._as_array(buffer)

    def _as_array(self, buffer: Bytes) -> Array:
        """Return the array of a decoded chunk, samples first."""
        return np.moveaxis(buffer.view(self.dtype).reshape(self._chunks), self._axis, 0)

    def _request(self, number: int, tile: int) -> tuple[Hashable, int, Load]:
        """Return the key, the size and the loader of a chunk, for the cache."""
        key = (self._key, self._grid.chunk(number, tile))
        return key, self._chunk_bytes, partial(self._load, number, tile)

    def _load(self, number: int, tile: int, out: Bytes) -> None:
        """Read and decode a chunk, at least the part of it that lies inside the dataset."""
        start, stop = self._range(number)
        if self._stored is None:
            _, inside, used = self._tiles[tile]
            self._select((slice(start, stop), *inside), self._as_array(out)[: stop - start, *used])
            return
        with self._reading(start, stop - 1):
            self._stored.read(self._grid.chunk(number, tile), out)

    def _range(self, number: int) -> tuple[int, int]:
        start = number * self.chunk_rows
        return start, min(start + self.chunk_rows, self.shape[0])

    def _select(self, selection: Any, out: Array) -> None:
        """Read through HDF5: some rows, a slice of rows, or a slice along each axis."""
        dataset, rows = self._dataset, selection[0] if isinstance(selection, tuple) else selection
        assert dataset is not None
        axis, each = self._axis, selection if isinstance(selection, tuple) else (selection,)
        each += (slice(None),) * (len(self.shape) - len(each))
        where = (*each[1 : axis + 1], each[0], *each[axis + 1 :])
        first, last = (rows.start, rows.stop - 1) if isinstance(rows, slice) else rows[[0, -1]]
        with self._reading(first, last), self._lock:
            out[...] = np.moveaxis(patiently(lambda: dataset[where]), axis, 0)


def _check_filters(dataset: h5py.Dataset, path: Path) -> None:
    for each in filters(dataset):
        if not h5py.h5z.filter_avail(each.id):
            with suppress(ImportError):
                plugins()
        if not h5py.h5z.filter_avail(each.id):
            raise DataError(
                f"shard {path}: {dataset.name.lstrip('/')!r} is compressed by the filter "
                f"{describe(each)}, which nothing installed can undo: pip install "
                "'hpctrain[codecs]'"
            )


@lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    log.warning("%s", message)
