"""Arrays in Zarr folders and zip files, read by zarr; see `array_base`.

xarray is not used: it reads a chunk that is missing as zeros if there is no fill value.
"""

import os
import zipfile
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from data_prep.formats.arrays.array_base import READING, ArrayFile, Where, choose, unreadable
from data_prep.formats.arrays.packing import ATTRIBUTES
from data_prep.libraries import library
from hpctrain.errors import DataError
from hpctrain.shards.types import Array

_SPARSE = ("csr_matrix", "csc_matrix")  # AnnData's encoding-type


class ZarrArray(ArrayFile):
    """An array in a Zarr store: a folder or a zip file."""

    def __init__(self, where: Where, axis: int) -> None:
        self._zip = None
        try:
            self._key = ""
            try:
                found, self._zip = _opened(where.path)
                if hasattr(found, "members"):
                    self._key = _key_in(found, where)
                    found = found[self._key]
            except READING as error:
                raise unreadable(where, error) from None
            if where.key.strip("/") and not self._key:
                raise DataError(f"{where.path} is itself an array and holds no {where.key!r}")
            self._array = found
            self._chunks = found.shards or found.chunks  # each of them is a file
            known = -len(self._chunks) <= axis < len(self._chunks)
            super().__init__(
                where, found.dtype, found.shape, axis, self._chunks[axis] if known else 1
            )
            self.attributes = {
                name: found.attrs[name] for name in ATTRIBUTES if name in found.attrs
            }
            # In version 2, xarray stores the value for missing numbers as the fill value.
            fill = found.metadata.fill_value
            self._has_fill = fill is not None
            if found.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in found.attrs:
                self.attributes |= {} if fill is None else {"_FillValue": fill}
        except BaseException:
            self.close()
            raise

    def _rows(self, start: int, stop: int) -> Array:
        if not self._has_fill:
            for name in self._chunk_names(start, stop):
                if not self._has(name):
                    raise DataError(
                        f"{self.where} has values that were never written, in the chunk {name}, "
                        "and no fill value"
                    )
        try:
            return self._cut(self._array, start, stop)
        except Exception as error:  # codecs may raise anything
            raise unreadable(self.where, error) from None

    def files(self, start: int, stop: int) -> Iterator[str]:
        """Yield the metadata files, and the chunks of these rows that exist."""
        if self._zip is not None:
            yield self.where.path
            return
        metadata = (os.path.join(self._key, name) for name in ("zarr.json", ".zarray", ".zattrs"))
        for name in (*metadata, *self._chunk_names(start, stop)):
            if self._has(name):
                yield os.path.join(self.where.path, name)

    def _has(self, name: str) -> bool:
        """Return whether the store has a file."""
        if self._zip is None:
            return os.path.exists(os.path.join(self.where.path, name))
        return name in self._zipped

    @cached_property
    def _zipped(self) -> frozenset[str]:
        with zipfile.ZipFile(self.where.path) as archive:
            return frozenset(archive.namelist())

    def _chunk_names(self, start: int, stop: int) -> Iterator[str]:
        """Yield the names in the store of the chunks of these rows, also of missing ones."""
        counts = [
            -(-size // chunk) for size, chunk in zip(self._array.shape, self._chunks, strict=True)
        ]
        grid = [range(count) for count in counts]
        if not self.single:
            chunk = self._chunks[self.axis]
            grid[self.axis] = range(start // chunk, -(-stop // chunk))
        for place in np.ndindex(*map(len, grid)):
            at = tuple(axis[i] for axis, i in zip(grid, place, strict=True))
            yield os.path.join(self._key, self._array.metadata.encode_chunk_key(at))

    def close(self) -> None:
        """See `ArrayFile`."""
        if self._zip is not None:
            self._zip.close()


def names_in(path: str) -> dict[str, str]:
    """Return the paths of the arrays in a store, each with its dtype and shape."""
    found, zipped = _opened(path)
    try:
        return _texts(found) if hasattr(found, "members") else {}  # else the store is an array
    finally:
        if zipped is not None:
            zipped.close()


def _opened(path: str) -> tuple[Any, Any]:
    """Return the group or array in a store, and the store if it is a zip file."""
    zarr = library("zarr", f"reading {path}")
    zipped = zarr.storage.ZipStore(path, mode="r") if path.lower().endswith(".zip") else None
    try:
        return zarr.open(zipped or path, mode="r"), zipped
    except BaseException:
        if zipped is not None and hasattr(zipped, "_zf"):  # otherwise opening it failed
            zipped.close()
        raise


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
