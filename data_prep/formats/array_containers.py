"""Readers of arrays in HDF5, NetCDF and Zarr, each through its own library; see `array_base`."""

import importlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import h5py
import numpy as np

from data_prep.formats.array_base import READING, ArrayFile, Where, choose, unreadable
from data_prep.formats.hdf5_storage import Written
from data_prep.formats.netcdf_classic import check_whole
from data_prep.formats.packing import ATTRIBUTES
from hpctrain.data.compression import plugins
from hpctrain.data.types import Array
from hpctrain.errors import DataError

HOPS = 64  # links followed one after the other; more are taken for a circle


def open_container(kind: str, where: Where, axis: int, external: bool) -> ArrayFile:
    """Open an array of the kind hdf5, netcdf or zarr; see `open_array`."""
    match kind:
        case "hdf5":
            return _HDF5(where, axis, external)
        case "netcdf":
            return _NetCDF(where, axis, external)
        case _:
            return _Zarr(where, axis)


def _library(name: str, where: Where) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"reading {where.path} needs {name}, which is not installed: "
            "pip install 'hpctrain[prep]'"
        ) from None


class _HDF5(ArrayFile):
    def __init__(self, where: Where, axis: int, external: bool) -> None:
        self._hint = ""
        try:
            plugins()  # Blosc, Zstd, LZ4, …
        except ImportError:
            self._hint = " (pip install 'hpctrain[codecs]' adds codecs that HDF5 does not have)"
        self._file = h5py.File(where.path, "r", locking=False)
        try:
            links = _Links(where, external)
            # Walk to the given name: the list of names does not show what links lead to.
            key = where.key or choose(where, _hdf5_names(self._file))
            if (found := links.find(self._file, key)) is None:
                key = choose(where, _hdf5_names(self._file))
                found = links.find(self._file, key)
            self._dataset = links.dataset(found)
            self._written = Written(self._dataset)
            self._others = links.files
            chunks, shape = self._dataset.chunks, self._dataset.shape
            if shape is None:
                raise DataError(f"{where} has no shape and no values (a null dataspace)")
            if (dtype := _hdf5_type(self._dataset)) is None:
                raise DataError(f"{where} has a type that NumPy does not have; store numbers")
            chunk = chunks[axis] if chunks and -len(chunks) <= axis < len(chunks) else 1
            super().__init__(where, dtype, shape, axis, chunk)
            self.attributes = {
                name: self._dataset.attrs[name] for name in ATTRIBUTES if name in found.attrs
            }
        except BaseException:
            self._file.close()
            raise

    def _rows(self, start: int, stop: int) -> Array:
        try:
            # Before reading: afterwards, HDF5 finds each chunk in its cache.
            if problem := self._written.problem(start, stop, self.axis):
                raise DataError(f"{self.where} {problem}")
            array = self._dataset[(slice(None),) * self.axis + (slice(start, stop),)]
        except READING as error:
            raise unreadable(self.where, OSError(f"{error}{self._hint}")) from None
        return np.moveaxis(array, self.axis, 0)

    def files(self, start: int, stop: int) -> Iterable[str]:
        """Return the file and the other files that links lead to."""
        return self.where.path, *self._others

    def close(self) -> None:
        """See `ArrayFile`."""
        self._file.close()


class _Links:
    """Finds a dataset link by link, so that every link to another file is noticed.

    Attributes:
        files: The other files that allowed links lead to.
    """

    def __init__(self, where: Where, external: bool) -> None:
        self._where, self._external = where, external
        self.files: list[str] = []

    def find(self, root: Any, key: str, hops: int = 0) -> Any:
        """Return the object at a path, or None if there is none."""
        here, names = root, [name for name in key.split("/") if name not in ("", ".")]
        while names:
            name = names.pop(0).encode()
            if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
                return None
            kind = here.id.links.get_info(name).type
            if kind == h5py.h5l.TYPE_SOFT:
                target = here.id.links.get_val(name).decode()
                hops += 1
                if hops > HOPS:
                    raise DataError(f"{self._where}: its links lead in a circle")
                names = [part for part in target.split("/") if part not in ("", ".")] + names
                here = here.file if target.startswith("/") else here
                continue
            if kind == h5py.h5l.TYPE_EXTERNAL:
                file, target = (os.fsdecode(part) for part in here.id.links.get_val(name))
                self._outside(here.file.filename, file, f"an external link to {file}:{target}")
                hops += 1
                if hops > HOPS:
                    raise DataError(f"{self._where}: its links lead in a circle")
            try:
                here = here[name]
            except (KeyError, OSError) as error:
                raise unreadable(self._where, OSError(str(error))) from None
        return here

    def dataset(self, found: Any) -> Any:
        """Check that an object is a dataset whose values are in files that may be read."""
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"{self._where} is a group; name one of the arrays in it")
        if found.external:
            raise DataError(
                f"{self._where} keeps its values in another file, {found.external[0][0]!r}; "
                "--field NAME=FILE:DTYPE:SHAPE reads raw files"
            )
        if found.is_virtual:
            self._check_sources(found.file, found.file.filename, found.name, ())
        return found

    def _check_sources(
        self, root: h5py.File, path: str, name: str, above: tuple[tuple[str, str], ...]
    ) -> None:
        """Check that the datasets that a virtual dataset is made of were written; none may be it.

        Raises:
            DataError: The message names the dataset.
        """
        here = os.path.realpath(path), name.strip("/")
        if here in above:  # HDF5 would follow the circle until the process crashes
            raise DataError(f"{self._where}: its virtual datasets lead in a circle")
        sources, _ = _sources(path, name, os.stat(path).st_mtime_ns) or ((), "")
        for file, source in sources:
            of, target = ("it", path) if file == "." else (file, "")
            what = f"virtual, of values in {file}:{source}"
            target = target or self._outside(path, file, what)
            # In this file, a link could lead to another one.
            missing = target == root.filename and self.find(root, source, 1) is None
            below = _sources(target, source, os.stat(target).st_mtime_ns)
            if missing or below is None or below[1]:
                problem = "is missing" if missing or below is None else below[1]
                raise DataError(f"{self._where} is virtual, and {source} of {of} {problem}")
            self._check_sources(root, target, source, (*above, here))

    def _outside(self, base: str, file: str, what: str) -> str:
        """Return the path of another file that is read, if that is allowed."""
        if not self._external:
            raise DataError(f"{self._where} is {what}; --external allows other files")
        path = os.path.join(os.path.dirname(base), file)
        if not os.path.isfile(path):  # HDF5 would return fill values
            raise DataError(f"{self._where} is {what}, and {path} is not there")
        self.files.append(path)
        return path


@lru_cache(maxsize=4096)
def _sources(path: str, name: str, _: int) -> tuple[tuple[tuple[str, str], ...], str] | None:
    """Return the files and datasets that a virtual dataset is made of, and `Written.problem`.

    Returns None without a dataset. The third argument is the file's time, for the cache.
    """
    with h5py.File(path, "r", locking=False) as file:
        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            return None
        sources = found.virtual_sources() if found.is_virtual else ()
        names = tuple((source.file_name, source.dset_name) for source in sources)
        return names, Written(found).problem()


def _hdf5_type(dataset: h5py.Dataset) -> Any:
    """Return a dataset's dtype, or None if NumPy has no such type, such as for H5T_TIME."""
    try:
        return dataset.dtype
    except TypeError:
        return None


def _hdf5_names(file: Any) -> dict[str, str]:
    names = {}

    def note(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            names[f"/{name}"] = f"{_hdf5_type(found) or 'of another type'} {found.shape}"

    file.visititems(note)
    return names


class _NetCDF(ArrayFile):
    def __init__(self, where: Where, axis: int, external: bool) -> None:
        netcdf = _library("netCDF4", where)
        check_whole(where.path)
        self._hdf5: h5py.File | None = None
        self._file = netcdf.Dataset(where.path, "r")
        try:
            names = dict(_netcdf_variables(self._file))
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
            if "_FillValue" not in found and dtype.itemsize > 1:
                self.attributes["_FillValue"] = netcdf.default_fillvals[dtype.str[1:]]
        except BaseException:
            self.close()
            raise

    def _rows(self, start: int, stop: int) -> Array:
        try:
            if self._hdf5 is not None:
                # Records behind the stored ones are read as the fill value.
                end = min(stop, self._stored_shape[self.axis])
                if problem := self._written.problem(min(start, end), end, self.axis):
                    raise DataError(f"{self.where} {problem}")
            array = self._variable[(slice(None),) * self.axis + (slice(start, stop),)]
        except READING as error:
            raise unreadable(self.where, error) from None
        return np.moveaxis(np.asarray(array), self.axis, 0)

    def files(self, start: int, stop: int) -> Iterable[str]:
        """Return the file and the other files that links lead to."""
        return self.where.path, *self._others

    def close(self) -> None:
        """See `ArrayFile`."""
        if self._hdf5 is not None:
            self._hdf5.close()
        self._file.close()


def _type_of(variable: Any) -> Any:
    """Return the dtype of a variable's values: object for text and variable-length arrays."""
    dtype = variable.dtype
    varies = type(variable.datatype).__name__ == "VLType"  # its dtype is that of the elements
    return np.dtype(object) if varies or not isinstance(dtype, np.dtype) else dtype


def _stored(file: h5py.File, where: Where, key: str, external: bool) -> tuple[Any, list[str]]:
    """Return the dataset that holds a variable's values, and the other files that hold some.

    A NetCDF4 file is an HDF5 file, and its library follows every link.
    """
    group, _, name = key.rpartition("/")
    links = _Links(Where(where.path, key), external)
    # A variable named like a dimension that is not its own is stored under another name: the
    # dimension has the name.
    for stored in (f"{group}/_nc4_non_coord_{name}", key):
        if (found := links.find(file, stored)) is not None:
            return links.dataset(found), links.files
    raise DataError(f"{where} is not where NetCDF4 would have it")


def _netcdf_variables(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, variable in group.variables.items():
        yield path + name, variable
    for name, inner in group.groups.items():
        yield from _netcdf_variables(inner, f"{path}{name}/")


class _Zarr(ArrayFile):
    def __init__(self, where: Where, axis: int) -> None:
        zarr = _library("zarr", where)
        self._zip = None
        try:
            store: Any = where.path
            if where.path.lower().endswith(".zip"):
                self._zip = store = zarr.storage.ZipStore(where.path, mode="r")
            try:
                found = zarr.open(store, mode="r")
            except READING as error:
                raise unreadable(where, error) from None
            self._key = ""
            if not isinstance(found, zarr.Array):
                try:
                    arrays = {
                        name: array
                        for name, array in sorted(found.members(max_depth=None))
                        if isinstance(array, zarr.Array)
                    }
                except READING as error:
                    raise unreadable(where, error) from None
                texts = {name: f"{array.dtype} {array.shape}" for name, array in arrays.items()}
                self._key = choose(Where(where.path, where.key.strip("/")), texts)
                found = arrays[self._key]
            elif where.key.strip("/"):
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
            there = self._members()
            for name in self._chunk_names(start, stop):
                if not there(name):
                    raise DataError(
                        f"{self.where} has values that were never written, in the chunk {name}, "
                        "and no fill value"
                    )
        try:
            array = self._array[(slice(None),) * self.axis + (slice(start, stop),)]
        except Exception as error:  # codecs may raise anything
            raise unreadable(self.where, error) from None
        return np.moveaxis(np.asarray(array), self.axis, 0)

    def files(self, start: int, stop: int) -> Iterator[str]:
        """Yield the metadata files, and the chunks of these rows that exist."""
        if self._zip is not None:
            yield self.where.path
            return
        metadata = (os.path.join(self._key, name) for name in ("zarr.json", ".zarray", ".zattrs"))
        for name in (*metadata, *self._chunk_names(start, stop)):
            if os.path.exists(path := os.path.join(self.where.path, name)):
                yield path

    def _members(self) -> Callable[[str], bool]:
        """Return a function that says whether the store has a file."""
        if self._zip is None:
            return lambda name: os.path.exists(os.path.join(self.where.path, name))
        with zipfile.ZipFile(self.where.path) as archive:
            return frozenset(archive.namelist()).__contains__

    def _chunk_names(self, start: int, stop: int) -> Iterator[str]:
        """Yield the names in the store of the chunks of these rows, also of missing ones."""
        counts = [
            -(-size // chunk) for size, chunk in zip(self._array.shape, self._chunks, strict=True)
        ]
        chunk = self._chunks[self.axis]
        grid = [range(count) for count in counts]
        grid[self.axis] = range(start // chunk, -(-stop // chunk))
        for place in np.ndindex(*map(len, grid)):
            at = tuple(axis[i] for axis, i in zip(grid, place, strict=True))
            yield os.path.join(self._key, self._array.metadata.encode_chunk_key(at))

    def close(self) -> None:
        """See `ArrayFile`."""
        if self._zip is not None and hasattr(self._zip, "_zf"):  # otherwise opening it failed
            self._zip.close()
