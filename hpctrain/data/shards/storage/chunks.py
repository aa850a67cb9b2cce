"""Read rows of an HDF5 dataset that is stored in chunks, compressed or not, without HDF5.

HDF5 decodes one chunk at a time, under one lock, and decodes it again for every later row. Here the
table of chunks is read from the file once. After that, bytes are read by `preadv` and decoded by
`codecs` in as many threads as there are callers. Decoded chunks stay in one cache of the process,
so an order that goes through the file in blocks decodes each chunk once per epoch:

    rows ──► which runs ──► in the cache? ──► gather
                  └── no: preadv ── codecs ──► cache       by the caller, or by the pool
                  (`prefetch`)

    >>> chunked = Chunked(file["image"], File(path), pool=ThreadPoolExecutor(2))
    >>> chunked.prefetch(np.arange(512, 1024))
    >>> chunked.rows(np.array([600, 513, 600])).shape
    (3, 3, 64, 64)

Other datasets are read by h5py, under a lock, into the same cache: those with filters that `codecs`
does not know, those without chunks, and those where a range of samples would take too much memory.
"""

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.base.files.record import say
from hpctrain.data.shards.storage.cache import CACHE, ChunkCache
from hpctrain.data.shards.storage.chunk_table import ChunkTable, filters, samples_first
from hpctrain.data.shards.storage.codecs import describe
from hpctrain.data.shards.storage.file import Damaged, File, Undecodable, patiently, reading
from hpctrain.data.shards.types import Array, Int64s

RUN_BYTES = 2**28  # the samples of a chunk take no more
_ROWS_BYTES = 2**16  # samples that are read at once where there are no chunks

_CODECS = ("lz4", "zstd")  # that data_prep writes, by hdf5plugin
_Visit = tuple[int, Any, Any]  # number of a run, rows of the result, rows of the run


@lru_cache(maxsize=1)
def decoders(pid: int) -> Executor:
    """Return the threads of a process for decoding; a fork does not have its parent's."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(pid)), "hpctrain-decoder")


class Chunked:
    """One dataset that is chunked, compressed or stored in another unusual way.

    Threads may share it. A forked child must drop it and open the dataset again. The file of h5py
    may be closed afterwards if it is `direct`, read without HDF5. `shape` has the samples first,
    whichever axis counts them. `chunk_rows` is the samples in a chunk, 1 if there are no chunks.
    They are read and kept in runs: the samples of a chunk, with those parts of them that lie in
    other chunks. Without a pool, runs are decoded when they are needed.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        file: File,
        *,
        pool: Executor | None = None,
        cache: ChunkCache = CACHE,
        axis: int = 0,
    ) -> None:
        self.name, self._axis = dataset.name.lstrip("/"), axis
        self.shape: tuple[int, ...] = samples_first(dataset.shape, axis)
        self.dtype: np.dtype[Any] = dataset.dtype
        self._pool, self._cache, self._lock = pool, cache, threading.Lock()
        self._dataset, self._stored = dataset, None
        self.chunk_rows = dataset.chunks[axis] if dataset.chunks else 1
        most = RUN_BYTES if dataset.chunks else _ROWS_BYTES
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        self._run = max(1, most // max(1, row_bytes))
        try:
            if dataset.chunks and min(self.chunk_rows, self.shape[0]) > self._run:
                raise Undecodable(f"the samples of a chunk have more than {most} bytes")
            self._stored = ChunkTable(dataset, file, axis)
            self._run = self.chunk_rows
        except Undecodable as reason:
            _check_filters(dataset, file.path)
            if dataset.chunks:
                self._run = min(self._run, self.chunk_rows)
                where = f"{file.path.parent}: {self.name!r}"
                say(f"{where} is decoded by HDF5, slowly: {reason}")
        except Damaged as error:
            raise DataError(f"shard {file.path}: {self.name!r} is damaged: {error}") from None
        self.direct = self._stored is not None
        self._run_bytes = max(1, self._run * row_bytes)
        self._reading = partial(reading, file.path, self.name)
        self._key = (file.key, self.name)

    def rows(self, rows: Int64s) -> Array:
        """Return the samples `rows`, (n,) with repeats allowed, in a new array."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        visits = self._visits(rows)
        self._ahead([number for number, _, _ in visits[1:]])
        for number, where, local in visits:
            out[where] = self._samples(number)[local]
        return out

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy the samples from `start` to `stop` into `out`, (stop - start, *shape[1:])."""
        numbers = range(start // self._run, -(-stop // self._run))
        self._ahead(numbers[1:])
        for number in numbers:
            first, last = self._range(number)
            begin, end = max(start, first), min(stop, last)
            out[begin - start : end - start] = self._samples(number)[begin - first : end - first]

    def prefetch(self, rows: Int64s) -> None:
        """Let the pool decode the runs of samples that will be read soon. Returns at once."""
        room = self._cache.max_bytes // 2 // self._run_bytes  # so that runs in use stay there
        self._ahead([number for number, _, _ in self._visits(rows)[:room]])

    def _visits(self, rows: Int64s) -> list[_Visit]:
        numbers, local = np.divmod(rows, self._run)
        if not len(rows):
            return []
        if (numbers == numbers[0]).all():
            return [(int(numbers[0]), slice(None), local)]
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        return [(int(numbers[part[0]]), part, local[part]) for part in parts]

    def _ahead(self, numbers: Sequence[int]) -> None:
        if self._pool is not None:
            for number in numbers:
                self._cache.start((self._key, number), partial(self._load, number), self._pool)

    def _samples(self, number: int) -> Array:
        """Return the samples of a run, (n, *shape[1:])."""
        return self._cache.get((self._key, number), partial(self._load, number))

    def _load(self, number: int) -> Array:
        start, stop = self._range(number)
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        where = (*[slice(None)] * self._axis, slice(start, stop))
        with self._reading(start, stop - 1):
            if self._stored is not None:
                self._stored.read(number, out)
            else:
                with self._lock:
                    found = patiently(lambda: self._dataset[where])
                out[...] = np.moveaxis(found, self._axis, 0)
        return out

    def _range(self, number: int) -> tuple[int, int]:
        start = number * self._run
        return start, min(start + self._run, self.shape[0])


def plugins() -> Any:
    """Return hdf5plugin (or raise ImportError), and make HDF5 use the codecs of hdf5plugin.

    HDF5 may have found other builds of the codecs before: netCDF4 sets HDF5_PLUGIN_PATH when it is
    imported. Another build writes the same values in other bytes.
    """
    library = import_module("hdf5plugin")
    files = library.get_config().registered_filters
    others = tuple(
        name for name in _CODECS if not files.get(name, "").startswith(library.PLUGIN_PATH)
    )
    if others:
        library.register(others, force=True)
    return library


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
