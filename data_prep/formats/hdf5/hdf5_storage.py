"""Check that the values that HDF5 returns were written, and into the file that the user named.

Links, virtual datasets and external storage lead to other files: all of them are refused.

HDF5 returns other values without any error in two cases. Values that were never written are read as
the fill value, or as whatever is in memory if the writer has switched fill values off. And the list
of chunks may be damaged, because its B-tree has no checksum: HDF5 then does not find some chunks,
and takes them for never written.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import h5py
import numpy as np

from data_prep.formats.opening import OTHERS
from hpctrain.base.errors import DataError
from hpctrain.data.shards.storage.chunk_table import chunk_grid, listed_chunks
from hpctrain.data.shards.storage.file import Damaged
from hpctrain.data.shards.storage.layout import Circle, Elsewhere
from hpctrain.data.shards.types import Int64s

_SPARSE = ("data", "indices", "indptr")
# Attributes of NetCDF's conventions, and the value with which they change nothing.
_PACKED = {"scale_factor": 1.0, "add_offset": 0.0} | dict.fromkeys(
    ("_FillValue", "missing_value"), math.nan
)
_BOUNDS = ("_Unsigned", "valid_range", "valid_min", "valid_max")


def of_another_program(found: Any) -> str:
    """Return why an object is not read as it lies (MATLAB, sparse, packed as in NetCDF); or ""."""
    for place in (found, found.parent):
        if "MATLAB_class" in place.attrs:
            return f"is of MATLAB, whose axes are reversed in HDF5; with mat73, {OTHERS}"
        inside = place is found or found.name.rpartition("/")[2] in _SPARSE
        parts = isinstance(place, h5py.Group) and all(name in place for name in _SPARSE)
        if parts and inside:
            return f"is a sparse matrix, or a part of one; with anndata or scipy, {OTHERS}"
    for name in (*_PACKED, *_BOUNDS) if isinstance(found, h5py.Dataset) else ():
        if name in found.attrs and not _changes_nothing(found, name):
            return (
                f"has the attribute {name}: its numbers are packed, or some of them mean that a "
                f"value is missing; with netCDF4 or xarray, {OTHERS}"
            )
    return ""


def _changes_nothing(found: h5py.Dataset, name: str) -> bool:
    value = np.asarray(found.attrs[name])
    if found.dtype.kind not in "iufb":  # text
        return True
    numbers = name in _PACKED and value.dtype.kind in "iuf"
    return numbers and np.array_equal(
        value.reshape(-1).astype(float), np.full(value.size, _PACKED[name]), equal_nan=True
    )


class Written:
    """The part of a dataset that was written into the file."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset, self._shape, self._chunks = dataset, dataset.shape, dataset.chunks
        properties = dataset.id.get_create_plist()
        # Whether a fill value stands for what was never written.
        self._filled = properties.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED and (
            properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        )
        self._sparse = False  # some chunk was not found

    def check(self, where: object, name: str, axis: int, *, accepted: bool) -> None:
        """Refuse values of the field `name` that were never written, unless that is `accepted`."""
        if not (count := self._unwritten(axis)):
            return
        size = (self._shape or (1,))[axis]
        lacks = f"{where} has {count:,} of {size:,} rows with values that were never written"
        if not self._filled:
            raise DataError(f"{lacks}, and no fill value stands for them")
        if not accepted:
            raise DataError(
                f"{lacks}; --unwritten {name} takes the fill value for them, which is right if the "
                "writer leaves out what holds nothing else"
            )

    def _unwritten(self, axis: int) -> int:
        """Return how many rows along an axis have values that were never written."""
        dataset, size = self._dataset, (self._shape or (1,))[axis]
        if not dataset.size:
            return 0
        if self._chunks is None:
            return 0 if dataset.id.get_storage_size() else size
        if dataset.id.get_num_chunks() == math.prod(self._grid):
            return 0
        try:
            places = np.unravel_index(self._listed, self._grid)[axis]
        except Damaged:  # `problem` says how
            return 0
        found, counts = np.unique(places, return_counts=True)
        whole = found[counts == math.prod(self._grid) // self._grid[axis]]
        step = self._chunks[axis]
        return size - int((np.minimum((whole + 1) * step, size) - whole * step).sum())

    def problem(self, start: int = 0, stop: int | None = None, axis: int = 0) -> str:
        """Return why the rows `start` to `stop` along `axis` are damaged, or ""."""
        shape, chunks = self._shape, self._chunks
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


@contextmanager
def in_one_file(where: object) -> Iterator[None]:
    """Refuse what lies in another file; `walk` and `check_here` find it."""
    try:
        yield
    except Elsewhere as error:
        raise DataError(f"{where} {error}; {OTHERS}") from None
    except Circle:
        raise DataError(f"{where}: its links lead in a circle") from None
