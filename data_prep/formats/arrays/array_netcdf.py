"""Arrays in NetCDF files, read by netCDF4; see `array_base`.

xarray is not used: it needs netCDF4 as well, and returns zeros for what was cut off a file.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import ArrayFile, Where, choose, never_written
from data_prep.formats.arrays.packing import ATTRIBUTES
from data_prep.formats.hdf5.hdf5_storage import Links, Written
from data_prep.libraries import library
from hpctrain.errors import DataError
from hpctrain.shards.types import Array


def open_netcdf(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a variable of a NetCDF file, which may be an HDF5 file."""
    netcdf = library("netCDF4", f"reading {where.path}")
    check_whole(where.path)
    file = opened.enter_context(netcdf.Dataset(where.path, "r"))
    names = dict(_variables(file))
    texts = {name: f"{_type_of(v)} {v.shape}" for name, v in names.items()}
    key = choose(Where(where.path, where.key.lstrip("/")), texts)
    stored, others = None, list[str]()
    if h5py.is_hdf5(where.path):
        hdf5 = opened.enter_context(h5py.File(where.path, "r", locking=False))
        stored, others = _stored(hdf5, where, key, external)
    return _NetCDFArray(where, names[key], axis, stored, others, netcdf.default_fillvals)


class _NetCDFArray(ArrayFile):
    """A variable, and the dataset that holds its values if the file is an HDF5 file."""

    def __init__(
        self,
        where: Where,
        variable: Any,
        axis: int | None,
        stored: h5py.Dataset | None,
        others: Sequence[str],
        fill_values: Any,
    ) -> None:
        variable.set_auto_maskandscale(False)  # our `packing` does this
        variable.set_auto_chartostring(False)
        self._variable, self._others = variable, others
        self._written = None if stored is None else Written(stored)
        self._stored_shape = () if stored is None else stored.shape
        self.filled = self._written is None or self._written.filled
        chunks, dtype, names = variable.chunking(), _type_of(variable), variable.ncattrs()
        super().__init__(
            *(where, dtype, variable.shape, axis),
            chunks=chunks if isinstance(chunks, list) else (),
            attributes={name: variable.getncattr(name) for name in ATTRIBUTES if name in names},
        )
        # Values that were never written are read as this. Single bytes have no such value.
        if "_FillValue" not in names and dtype.itemsize > 1 and not self.text:
            self.attributes["_FillValue"] = fill_values[dtype.str[1:]]

    def _unwritten(self) -> str:
        if self._written is None:
            return ""
        rows, stored = self._rows_shape[0], 1 if self.single else self._stored_shape[self.axis]
        # Another variable has more records: those behind the stored ones were never written.
        return never_written(self._written.unwritten(self.axis) + max(0, rows - stored), rows)

    def _rows(self, start: int, stop: int) -> Array:
        if self._written is not None:
            # Records behind the stored ones are read as the fill value.
            end = stop if self.single else min(stop, self._stored_shape[self.axis])
            if problem := self._written.problem(min(start, end), end, self.axis):
                raise DataError(f"{self.where} {problem}")
        return self._cut(self._variable, start, stop)

    def _files(self, start: int, stop: int) -> Iterable[str]:
        return self.where.path, *self._others


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
    """Check that a file is as long as its header says. A file of another format passes.

    netCDF4 reads what was cut off a classic file as zeros.
    """
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
    """The header of a classic file behind its first four bytes."""

    def __init__(self, file: IO[bytes], version: int) -> None:
        self._file = file
        self._count = 8 if version == 5 else 4  # bytes of a count
        self._offset = 4 if version == 1 else 8  # bytes of a byte offset

    def end(self) -> int:
        """Return the byte offset at which the last variable ends."""
        records = self._number()
        if records == 256**self._count - 1:  # written as a stream: the number is not known
            records = 0
        dims = []
        for _ in self._list():
            self._padded(1)
            dims.append(self._number())
        self._attributes()
        variables = [self._variable(dims) for _ in self._list()]
        sizes = [size for is_record, _, size in variables if is_record]
        # Each variable of a record is padded to 4 bytes, unless it is the only one.
        step = sizes[0] if len(sizes) == 1 else sum(-(-size // 4) * 4 for size in sizes)
        return max(
            self._file.tell(),
            *(
                begin + size + (records - 1) * step * is_record
                for is_record, begin, size in variables
                if records or not is_record
            ),
            0,
        )

    def _variable(self, dims: Sequence[int]) -> tuple[bool, int, int]:
        """Return whether a variable is one of records, its offset, and its size or its record's."""
        self._padded(1)
        shape = [dims[self._number()] for _ in range(self._number())]
        self._attributes()
        size = SIZES[self._number(4)]
        self._number()  # vsize, which is wrong for large variables
        is_record = shape[:1] == [0]  # the first dimension is the record dimension
        return is_record, self._number(self._offset), size * math.prod(shape[is_record:])

    def _number(self, size: int = 0) -> int:
        return int.from_bytes(self._read(size or self._count))

    def _list(self) -> range:
        self._number(4)  # the tag of the list
        return range(self._number())

    def _attributes(self) -> None:
        for _ in self._list():
            self._padded(1)
            self._padded(SIZES[self._number(4)])

    def _padded(self, size: int) -> None:
        """Skip a name, or values of some size, behind their number."""
        size *= self._number()
        if size > MOST:
            raise OverflowError
        self._read(-(-size // 4) * 4)

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) < size:
            raise EOFError
        return content
