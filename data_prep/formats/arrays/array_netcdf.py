"""Arrays in NetCDF files, read by netCDF4; see `array_base`.

xarray is not used: it needs netCDF4 as well, and returns zeros for what was cut off a file.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import READING, ArrayFile, Where, choose, unreadable
from data_prep.formats.arrays.packing import ATTRIBUTES
from data_prep.formats.hdf5.hdf5_links import Links
from data_prep.formats.hdf5.hdf5_storage import Written
from data_prep.libraries import library
from hpctrain.errors import DataError
from hpctrain.shards.types import Array


class NetCDFArray(ArrayFile):
    """A variable of a NetCDF file, which may be an HDF5 file."""

    def __init__(self, where: Where, axis: int, external: bool) -> None:
        netcdf = library("netCDF4", f"reading {where.path}")
        check_whole(where.path)
        self._hdf5: h5py.File | None = None
        self._file = netcdf.Dataset(where.path, "r")
        try:
            names = dict(_variables(self._file))
            key = where.key.lstrip("/")
            texts = {name: f"{_type_of(v)} {v.shape}" for name, v in names.items()}
            key = choose(Where(where.path, key), texts)
            self._others: Sequence[str] = ()
            if h5py.is_hdf5(where.path):
                self._hdf5 = h5py.File(where.path, "r", locking=False)
                stored, self._others = _stored(self._hdf5, where, key, external)
                self._written, self._stored_shape = Written(stored), stored.shape
            self._variable = names[key]
            self._variable.set_auto_maskandscale(False)  # our `packing` does this
            self._variable.set_auto_chartostring(False)
            chunks = self._variable.chunking()
            known = isinstance(chunks, list) and -len(chunks) <= axis < len(chunks)
            dtype = _type_of(self._variable)
            super().__init__(where, dtype, self._variable.shape, axis, chunks[axis] if known else 1)
            found = self._variable.ncattrs()
            self.attributes = {
                name: self._variable.getncattr(name) for name in ATTRIBUTES if name in found
            }
            # Values that were never written are read as this. Single bytes have no such value.
            if "_FillValue" not in found and dtype.itemsize > 1 and not self.text:
                self.attributes["_FillValue"] = netcdf.default_fillvals[dtype.str[1:]]
        except BaseException:
            self.close()
            raise

    def _rows(self, start: int, stop: int) -> Array:
        try:
            if self._hdf5 is not None:
                # Records behind the stored ones are read as the fill value.
                end = stop if self.single else min(stop, self._stored_shape[self.axis])
                if problem := self._written.problem(min(start, end), end, self.axis):
                    raise DataError(f"{self.where} {problem}")
            return self._cut(self._variable, start, stop)
        except READING as error:
            raise unreadable(self.where, error) from None

    def files(self, start: int, stop: int) -> Iterable[str]:
        """Return the file and the other files that links lead to."""
        return self.where.path, *self._others

    def close(self) -> None:
        """See `ArrayFile`."""
        if self._hdf5 is not None:
            self._hdf5.close()
        self._file.close()


def names_in(path: str) -> list[str]:
    """Return the paths of the variables in a file."""
    with library("netCDF4", f"reading {path}").Dataset(path, "r") as file:
        return [name for name, _ in _variables(file)]


def _type_of(variable: Any) -> Any:
    """Return the dtype of a variable's values: object for variable-length arrays."""
    dtype = variable.dtype
    if dtype is str:
        return np.dtypes.StringDType()
    varies = type(variable.datatype).__name__ == "VLType"  # the dtype is that of the elements
    return np.dtype(object) if varies or not isinstance(dtype, np.dtype) else dtype


def _stored(file: h5py.File, where: Where, key: str, external: bool) -> tuple[Any, list[str]]:
    """Return the dataset that holds a variable's values, and the other files that hold some.

    A NetCDF4 file is an HDF5 file, and its library follows every link.
    """
    group, _, name = key.rpartition("/")
    links = Links(Where(where.path, key), external)
    # A variable named like a dimension that is not its own is stored under another name: the
    # dimension has the name.
    for stored in (f"{group}/_nc4_non_coord_{name}", key):
        if (found := links.find(file, stored)) is not None:
            return links.dataset(found), links.files
    raise DataError(f"{where} is not where NetCDF4 would have it")


def _variables(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, variable in group.variables.items():
        yield path + name, variable
    for name, inner in group.groups.items():
        yield from _variables(inner, f"{path}{name}/")


SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}  # bytes, by type
MOST = 2**24  # bytes of a name or of an attribute's values; more is taken for damage


def check_whole(path: str) -> None:
    """Check that a file is as long as its header says. A file of another format passes."""
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\x01", b"\x02", b"\x05"):
            return
        found = os.stat(file.fileno()).st_size
        try:
            needed = _Header(file, magic[3]).end()
        except (EOFError, KeyError, IndexError, OverflowError):
            raise DataError(f"{path} is truncated or damaged in its header") from None
    if found < needed:
        raise DataError(
            f"{path} is truncated: its header says {needed:,} bytes, {found:,} are there"
        )


class _Header:
    def __init__(self, file: IO[bytes], version: int) -> None:
        self._file = file
        self._count = 8 if version == 5 else 4  # bytes of a count
        self._offset = 4 if version == 1 else 8  # bytes of a byte offset

    def end(self) -> int:
        """Return the byte offset at which the last variable ends."""
        records = self._number(self._count)
        if records == 256**self._count - 1:  # written as a stream: the number is not known
            records = 0
        dims = []
        for _ in range(self._list()):
            self._text()
            dims.append(self._number(self._count))
        self._attributes()
        ends, per_record, lasts = [self._file.tell()], [], []
        for _ in range(self._list()):
            self._text()
            shape = [dims[self._number(self._count)] for _ in range(self._number(self._count))]
            self._attributes()
            size = SIZES[self._number(4)]
            self._number(self._count)  # vsize, which is wrong for large variables
            begin = self._number(self._offset)
            if shape and shape[0] == 0:  # the record dimension
                one = size * math.prod(shape[1:])
                per_record.append(one)
                lasts.append(begin + one)
            else:
                ends.append(begin + size * math.prod(shape))
        # Each variable of a record is padded to 4 bytes, unless it is the only one.
        step = (
            per_record[0] if len(per_record) == 1 else sum(-(-one // 4) * 4 for one in per_record)
        )
        if records:
            ends += [last + (records - 1) * step for last in lasts]
        return max(ends)

    def _number(self, size: int) -> int:
        return int.from_bytes(self._read(size))

    def _list(self) -> int:
        self._number(4)  # the tag of the list
        return self._number(self._count)

    def _text(self) -> None:
        self._padded(self._number(self._count))

    def _attributes(self) -> None:
        for _ in range(self._list()):
            self._text()
            size = SIZES[self._number(4)]
            self._padded(self._number(self._count) * size)

    def _padded(self, size: int) -> None:
        if size > MOST:
            raise OverflowError
        self._read(-(-size // 4) * 4)

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) < size:
            raise EOFError
        return content
