"""The chunks of a dataset: which samples each holds, where it lies and how it is decoded."""

import math
from typing import Any

import h5py
import numpy as np

from hpctrain.data.shards.storage.codecs import Filter, Pipeline
from hpctrain.data.shards.storage.file import Bytes, Damaged, File, Undecodable, scratch
from hpctrain.data.shards.types import Array, Int64s

MOST = 2**28  # chunks; their table takes 5 GB

Sizes = tuple[int, ...]


def samples_first(sizes: Sizes, axis: int) -> Sizes:
    """Return a shape with `axis` moved to the front."""
    return (sizes[axis], *sizes[:axis], *sizes[axis + 1 :])


class ChunkTable:
    """The chunks of a dataset as they are stored.

    A dataset that only HDF5 can read is Undecodable. Chunks beyond the end of the file, or where
    none can be, or an absurd number of them are Damaged.
    """

    def __init__(self, dataset: h5py.Dataset, file: File, axis: int = 0) -> None:
        self._pipeline = _pipeline(dataset)
        self._file, self._axis, self._grid = file, axis, chunk_grid(dataset)
        self._shape, self._dtype, self._fill = dataset.chunks, dataset.dtype, dataset.fillvalue
        count = math.prod(self._grid)
        if count > MOST:
            raise Damaged(f"it lists {count:,} chunks")
        chunks, found = listed_chunks(dataset)
        # 20 bytes per chunk. Chunks that were never written are not listed.
        self._offsets = np.full(count, -1, np.int64)
        self._sizes = np.zeros(count, np.int64)
        self._masks = np.zeros(count, np.uint32)
        end = max((chunk.byte_offset + chunk.size for chunk in found), default=0)
        if end > self._file.size:
            raise Damaged(f"its chunks reach to byte {end}, the file ends at {self._file.size}")
        if found:
            self._offsets[chunks] = [chunk.byte_offset for chunk in found]
            self._sizes[chunks] = [chunk.size for chunk in found]
            self._masks[chunks] = [chunk.filter_mask for chunk in found]
        wrong = self._sizes[chunks] != self._pipeline.nbytes
        if not self._pipeline.applied(0) and wrong.any():
            size = self._sizes[chunks][wrong][0]
            raise Damaged(f"it lists a chunk of {size} bytes, not {self._pipeline.nbytes}")

    def read(self, run: int, out: Array) -> None:
        """Fill `out`, (n, *shape), with the samples of a run: those of one chunk, or of some."""
        whole = out.shape == self._shape and not self._axis
        size, grid = samples_first(self._shape, self._axis)[1:], list(self._grid)
        grid[self._axis] = 1
        for place in np.ndindex(*grid):
            at = (*place[: self._axis], run, *place[self._axis + 1 :])
            number = int(np.ravel_multi_index(at, self._grid))
            if whole:
                return self._read(number, out.reshape(-1).view(np.uint8))
            decoded = scratch("chunk", self._pipeline.nbytes)
            self._read(number, decoded)
            chunk = np.moveaxis(decoded.view(self._dtype).reshape(self._shape), self._axis, 0)
            starts = np.multiply(samples_first(place, self._axis)[1:], size)
            part = out[:, *map(slice, starts, starts + size)]  # what is beyond the end is left out
            part[...] = chunk[tuple(map(slice, part.shape))]
        return None

    def _read(self, chunk: int, out: Bytes) -> None:
        """Fill `out` with a whole chunk. A chunk that was never written holds the fill value."""
        if self._offsets[chunk] < 0:
            out.view(self._dtype)[:] = self._fill
        elif not self._pipeline.applied(int(self._masks[chunk])):
            if self._sizes[chunk] != self._pipeline.nbytes:
                raise Damaged(f"it has {self._sizes[chunk]} bytes, not {self._pipeline.nbytes}")
            self._file.read(int(self._offsets[chunk]), out)
        else:
            stored = scratch("stored", int(self._sizes[chunk]))
            self._file.read(int(self._offsets[chunk]), stored)
            self._pipeline.decode(stored, int(self._masks[chunk]), out)


def chunk_grid(dataset: h5py.Dataset) -> list[int]:
    """Return the number of chunks along each axis of a dataset."""
    return [-(-size // part) for size, part in zip(dataset.shape, dataset.chunks, strict=True)]


def listed_chunks(dataset: h5py.Dataset) -> tuple[Int64s, list[Any]]:
    """Return the chunks that the file lists: their numbers in C order, and h5py's `StoreInfo`."""
    found: list[Any] = []
    if dataset.id.get_num_chunks():
        dataset.id.chunk_iter(found.append)
    if not found:
        return np.zeros(0, np.int64), found
    places = np.array([chunk.chunk_offset for chunk in found], np.uint64)
    numbers, beside = np.divmod(places, np.array(dataset.chunks, np.uint64))
    grid = chunk_grid(dataset)
    if (wrong := beside.any(1) | (numbers >= np.array(grid, np.uint64)).any(1)).any():
        raise Damaged(f"it lists a chunk at {places[wrong][0].tolist()}, where none can be")
    chunks = np.ravel_multi_index(tuple(numbers.astype(np.int64).T), grid)
    if len(np.unique(chunks)) < len(chunks):
        raise Damaged("it lists a chunk twice")
    return chunks, found


def _pipeline(dataset: h5py.Dataset) -> Pipeline:
    """Return the decoder of a dataset's chunks."""
    if dataset.chunks is None:
        raise Undecodable("it has no chunks")
    if dataset.file.driver not in ("sec2", "stdio") or dataset.file.userblock_size:
        raise Undecodable("the chunks' offsets are not those of the file")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype)):
        raise Undecodable(f"its type is stored otherwise than numpy's {dataset.dtype}")
    if not hasattr(dataset.id, "chunk_iter"):
        raise Undecodable("this HDF5 cannot list chunks; 1.14 can")
    nbytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    return Pipeline(filters(dataset), nbytes)


def filters(dataset: h5py.Dataset) -> list[Filter]:
    """Return the filters of a dataset, in the order in which they were applied."""
    properties = dataset.id.get_create_plist()
    return [Filter(*properties.get_filter(i)) for i in range(properties.get_nfilters())]
