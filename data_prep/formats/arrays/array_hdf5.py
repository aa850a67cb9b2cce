"""Arrays in HDF5 files, read by h5py; see `array_base`."""

from collections.abc import Iterable
from typing import Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import READING, ArrayFile, Where, choose, unreadable
from data_prep.formats.arrays.packing import ATTRIBUTES
from data_prep.formats.hdf5.hdf5_links import Links
from data_prep.formats.hdf5.hdf5_storage import Written
from hpctrain.errors import DataError
from hpctrain.shards.compression import plugins
from hpctrain.shards.types import Array


class HDF5Array(ArrayFile):
    """An array in an HDF5 file."""

    def __init__(self, where: Where, axis: int, external: bool) -> None:
        self._hint = ""
        try:
            plugins()  # Blosc, Zstd, LZ4, …
        except ImportError:
            self._hint = " (pip install 'hpctrain[codecs]' adds codecs that HDF5 does not have)"
        self._file = h5py.File(where.path, "r", locking=False)
        try:
            links = Links(where, external)
            # Walk to the given name: the list of names does not show what links lead to.
            key = where.key or choose(where, _names(self._file))
            if (found := links.find(self._file, key)) is None:
                key = choose(where, _names(self._file))
                found = links.find(self._file, key)
            self._dataset = links.dataset(found)
            self._written = Written(self._dataset)
            self._others = links.files
            chunks, shape = self._dataset.chunks, self._dataset.shape
            if shape is None:
                raise DataError(f"{where} has no shape and no values (a null dataspace)")
            if (dtype := _type_of(self._dataset)) is None:
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


def _type_of(dataset: h5py.Dataset) -> Any:
    """Return a dataset's dtype, or None if NumPy has no such type, such as for H5T_TIME."""
    try:
        return dataset.dtype
    except TypeError:
        return None


def _names(file: Any) -> dict[str, str]:
    names = {}

    def note(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            names[f"/{name}"] = f"{_type_of(found) or 'of another type'} {found.shape}"

    file.visititems(note)
    return names
