"""Arrays in HDF5 files, read by h5py; see `array_base`.

A key is the path of a dataset, or PATH@NAME for an attribute.
"""

from contextlib import ExitStack
from typing import Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import OpenedArray, Where, choose
from data_prep.formats.hdf5 import groups
from data_prep.formats.hdf5.hdf5_storage import Written, in_one_file, of_another_program
from hpctrain.base.errors import DataError
from hpctrain.data.shards.storage.chunks import plugins
from hpctrain.data.shards.storage.layout import check_here, walk

_SHOWN = 20  # names that a message lists
_LISTED = 10_000  # names that are looked at when a file is described


def open_hdf5(where: Where, opened: ExitStack) -> OpenedArray:
    """Open an array in an HDF5 file; see `open_array`."""
    file = opened.enter_context(h5py.File(where.path, "r", locking=False))
    with in_one_file(where):
        # Walk to the given name: the list of names does not show what links lead to.
        found = walk(file, where.key) if where.key else None
        if found is None:
            if (value := _attribute(file, where.key)) is not None:
                array = np.asarray(value)
                return OpenedArray(array.dtype, array.shape, lambda: array)
            found = walk(file, choose(where, names_of(file)))
        if problem := of_another_program(found):
            raise DataError(f"{where} {problem}")
        if not isinstance(found, h5py.Dataset):
            listed = ", ".join([*found][:_SHOWN]) or "there are none"
            raise DataError(f"{where} is a group; name one of the arrays in it: {listed}")
        dataset, hint = check_here(found), ""
    try:
        plugins()  # Blosc, Zstd, LZ4, …
    except ImportError:
        hint = " (pip install 'hpctrain[codecs]' adds codecs that HDF5 does not have)"
    if dataset.shape is None:
        raise DataError(f"{where} has no shape and no values (a null dataspace)")
    if (dtype := _type_of(dataset)) is None:
        raise DataError(f"{where} has a type that NumPy does not have; store numbers")
    if h5py.check_string_dtype(dtype):
        dtype = np.dtypes.StringDType()
    written = Written(dataset)
    how: Any = {"chunks": dataset.chunks, "written": written, "hint": hint}
    return OpenedArray(dtype, dataset.shape, lambda: dataset, written.problem, **how)


def matching(where: Where) -> tuple[list[groups.Match], list[str]]:
    """Return what matches the pattern in a key, also by links; see `groups.matching`."""
    with h5py.File(where.path, "r", locking=False) as file, in_one_file(where):

        def names(path: str) -> list[str]:
            found = walk(file, path)
            return list(found) if isinstance(found, h5py.Group) else []

        def has(path: str) -> bool:
            return walk(file, path) is not None or _attribute(file, path) is not None

        return groups.matching(where.key, names, has)


def names_of(file: h5py.File) -> dict[str, str]:
    """Return the paths of the first datasets of a file, each with its dtype and shape."""
    names: dict[str, str] = {}

    def note(name: str, found: Any) -> bool | None:
        if isinstance(found, h5py.Dataset):
            names[f"/{name}"] = f"{_type_of(found) or 'of another type'} {found.shape}"
        return True if len(names) >= _LISTED else None

    try:
        file.visititems(note)
    except (KeyError, OSError, RuntimeError, ValueError) as error:  # the tree of its groups
        raise DataError(f"{file.filename} is not readable as HDF5: {error}") from None
    return names


def _attribute(file: h5py.File, key: str) -> Any:
    """Return the value of the attribute that a key PATH@NAME names, or None."""
    path, at, name = key.rpartition("@")
    found = walk(file, path) if at else None
    return found.attrs[name] if found is not None and name in found.attrs else None


def _type_of(dataset: h5py.Dataset) -> Any:
    """Return a dataset's dtype, or None if NumPy has no such type, such as for H5T_TIME."""
    try:
        return dataset.dtype
    except TypeError:
        return None
