"""Arrays in Zarr folders, read by zarr; see `array_base`.

xarray is not used: it reads a chunk that is missing as zeros if there is no fill value.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.arrays.array_base import ArrayFile, Where, choose, never_written
from data_prep.formats.files import check_regular
from data_prep.libraries import library
from hpctrain.disk import open_regular
from hpctrain.errors import DataError
from hpctrain.shards.types import Array

_SPARSE = ("csr_matrix", "csc_matrix")  # AnnData's encoding-type


def open_zarr(where: Where, axis: int | None, opened: ExitStack) -> ArrayFile:
    """Open an array in a Zarr store, which is a folder."""
    found, key = _store(where.path), ""
    if hasattr(found, "members"):
        key = _key_in(found, where)
        found = found[key]
    if where.key.strip("/") and not key:
        raise DataError(f"{where.path} is itself an array and holds no {where.key!r}")
    return _ZarrArray(where, key, found, axis)


class _ZarrArray(ArrayFile):
    def __init__(self, where: Where, key: str, found: Any, axis: int | None) -> None:
        self._key, self._array = key, found
        self._chunks = found.shards or found.chunks  # each of them is a file
        super().__init__(
            where, found.dtype, found.shape, axis, chunks=self._chunks, attributes=found.attrs
        )
        fill = found.metadata.fill_value
        self.filled = fill is not None
        # In version 2, xarray stores the value for missing numbers as the fill value.
        by_xarray = found.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in found.attrs
        self.attributes |= {"_FillValue": fill} if by_xarray and self.filled else {}

    def _unwritten(self) -> str:
        gone, shape = np.zeros(self._rows_shape[0], bool), self._array.shape
        for place, name in self._stored(0, len(gone)):
            for inner in np.argwhere(~self._there(name)):
                first = np.multiply(place, self._chunks) + inner * self._array.chunks
                if self.single or (first < shape).all():
                    start = 0 if self.single else first[self.axis]
                    gone[start : start + (self._array.chunks or (1,))[self.axis]] = True
        return never_written(int(gone.sum()), len(gone))

    def _there(self, name: str) -> NDArray[np.bool_]:
        """Return which of the chunks of a file that the store may have were written."""
        array = self._array
        there = np.full([a // b for a, b in zip(self._chunks, array.chunks, strict=True)], True)
        if not self._has(name):
            return ~there
        if not array.shards:
            return there
        settings = array.metadata.to_dict()["codecs"][0]["configuration"]
        codecs = [codec["name"] for codec in settings["index_codecs"]]
        if codecs not in (["bytes"], ["bytes", "crc32c"]):
            return there  # not known
        # The index of a shard: the offset and size of each chunk, or only ones.
        size = 16 * there.size + 4 * (len(codecs) - 1)
        path = os.path.join(self.where.path, name)
        with open_regular(Path(path), 0) as file:
            if settings["index_location"] == "end":
                file.seek(-size, os.SEEK_END)
            index = np.frombuffer(file.read(size)[: 16 * there.size], "u8")
        there[...] = (index[::2] != np.iinfo("u8").max).reshape(there.shape)
        return there

    def _rows(self, start: int, stop: int) -> Array:
        return self._cut(self._array, start, stop)

    def _files(self, start: int, stop: int) -> Iterator[str]:
        """Yield the metadata files, and the chunks of these rows that exist."""
        metadata = (os.path.join(self._key, name) for name in ("zarr.json", ".zarray", ".zattrs"))
        for name in (*metadata, *(name for _, name in self._stored(start, stop))):
            if self._has(name):
                yield os.path.join(self.where.path, name)

    def _has(self, name: str) -> bool:
        """Return whether the store has a file."""
        return os.path.exists(os.path.join(self.where.path, name))

    def _stored(self, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield each chunk or shard of these rows, also missing ones, and its name in the store."""
        sizes = zip(self._array.shape, self._chunks, strict=True)
        grid = [range(-(-size // chunk)) for size, chunk in sizes]
        if not self.single:
            chunk = self._chunks[self.axis]
            grid[self.axis] = range(start // chunk, -(-stop // chunk))
        for place in np.ndindex(*map(len, grid)):
            at = tuple(axis[i] for axis, i in zip(grid, place, strict=True))
            yield at, os.path.join(self._key, self._array.metadata.encode_chunk_key(at))


def _store(path: str) -> Any:
    """Return the group or array in a store."""
    zarr = library("zarr", f"reading {path}")
    if not os.path.isdir(path):
        raise DataError(f"{path} is no folder; `unzip` makes one of a .zarr.zip")
    check_regular(os.path.abspath(path))
    return zarr.open(path, mode="r")


def _texts(group: Any) -> dict[str, str]:
    members = sorted(group.members(max_depth=None))
    return {name: f"{a.dtype} {a.shape}" for name, a in members if hasattr(a, "dtype")}


def _key_in(group: Any, where: Where) -> str:
    """Return the path of an array in a group; see `choose`."""
    key = where.key.strip("/")
    for path in (key, key.rpartition("/")[0]):
        found = group.get(path) if path and ".." not in path.split("/") else group
        if str(getattr(found, "attrs", {}).get("encoding-type", "")).endswith(_SPARSE):
            raise DataError(
                f"{where} is a sparse matrix, or a part of one, which is read from HDF5 only: "
                "`data.write_h5ad(FILE)` in Python stores it there"
            )
    if key and ".." not in key.split("/") and hasattr(group.get(key), "dtype"):
        return key  # without a look at all others
    return choose(Where(where.path, key), _texts(group))
