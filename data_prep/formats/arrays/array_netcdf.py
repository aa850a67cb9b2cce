"""Arrays in NetCDF files, read by netCDF4; see `array_base`.

xarray is not used: it needs netCDF4 as well, and returns zeros for what was cut off a file.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import READING, ArrayFile, Where, choose, unreadable
from data_prep.formats.arrays.netcdf_classic import check_whole
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
