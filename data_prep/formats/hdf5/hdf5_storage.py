"""Check that the values that HDF5 returns were written into the file.

HDF5 returns other values without any error in two cases. Values that were never written are read as
the fill value, or as whatever is in memory if the writer has switched fill values off. And the list
of chunks may be damaged, because its B-tree has no checksum: HDF5 then does not find some chunks,
and takes them for never written.
"""

import itertools
from contextlib import suppress
from functools import cached_property

import h5py
import numpy as np

from hpctrain.shards.storage.chunk_table import chunk_grid, listed_chunks
from hpctrain.shards.storage.scratch import Damaged
from hpctrain.shards.types import Int64s


class Written:
    """The part of a dataset that was written into the file."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset, self._shape, self._chunks = dataset, dataset.shape, dataset.chunks
        properties = dataset.id.get_create_plist()
        self._filled = properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        user_defined = properties.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
        elsewhere = dataset.is_virtual or dataset.external
        self._sparse = False  # some chunk was not found
        self._empty = bool(
            dataset.size
            and not elsewhere
            and not (self._filled and user_defined)
            and not dataset.id.get_storage_size()
        )

    def problem(self, start: int = 0, stop: int | None = None, axis: int = 0) -> str:
        """Return why the rows `start` to `stop` along `axis` cannot be read, or ""."""
        shape, chunks = self._shape, self._chunks
        if self._empty:
            return f"was made for {list(shape)} values, none of which was ever written"
        if chunks is None:
            return ""
        grid = [range(0, size, step) for size, step in zip(shape, chunks, strict=True)]
        step, stop = chunks[axis], shape[axis] if stop is None else stop
        grid[axis] = range(start // step * step, stop, step)
        for place in itertools.product(*grid):
            # A failing search is slow. After the first one, only listed chunks are searched.
            if (not self._sparse or self._is_listed(place)) and self._is_found(place):
                continue
            self._sparse = True
            try:
                is_listed = self._is_listed(place)
            except Damaged as error:
                return f"is damaged: {error}"
            if is_listed:
                return f"is damaged: HDF5 does not find the chunk at {list(place)} that it lists"
            if not self._filled:
                return (
                    f"has values that were never written, from {list(place)} on, and its writer "
                    "has switched fill values off"
                )
        return ""

    def _is_found(self, place: tuple[int, ...]) -> bool:
        """Return whether HDF5 finds a chunk. Its bytes are not read: there is no room for them."""
        with suppress(OSError, RuntimeError):
            try:
                self._dataset.id.read_direct_chunk(place, out=bytearray())
            except ValueError:
                return True
        return False

    def _is_listed(self, place: tuple[int, ...]) -> bool:
        number = 0
        for at, step, count in zip(place, self._chunks, self._grid, strict=True):
            number = number * count + at // step
        at = int(np.searchsorted(self._listed, number))
        return at < len(self._listed) and bool(self._listed[at] == number)

    @cached_property
    def _grid(self) -> list[int]:
        return chunk_grid(self._dataset)

    @cached_property
    def _listed(self) -> Int64s:
        numbers, _ = listed_chunks(self._dataset)
        return np.sort(numbers)
