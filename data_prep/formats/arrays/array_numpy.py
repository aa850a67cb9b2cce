"""Arrays in .npy files; see `array_base`."""

import math
import os
from contextlib import ExitStack
from typing import IO, Any

import numpy as np

from data_prep.formats.arrays.array_base import SLAB_BYTES, ArrayFile, Where, check_dtype
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.types import Array

VERSIONS = ((1, 0), (2, 0), (3, 0))  # of a .npy file


def open_npy(where: Where, axis: int | None, opened: ExitStack) -> ArrayFile:
    """Open a .npy file."""
    if where.key:
        raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
    with open(where.path, "rb") as file:
        shape, fortran, dtype = header(file)
        begin = file.tell()
    check_dtype(where, dtype)
    check_size(where, dtype.itemsize * math.prod(shape), os.stat(where.path).st_size - begin)
    return _Flat(where, dtype, shape, axis, begin, fortran)


def check_size(where: Where, needed: int, found: int) -> None:
    """Compare the bytes of an array with those that are there."""
    if needed > found:
        raise DataError(
            f"{where} is truncated: its header says {needed:,} bytes of data, {found:,} are there"
        )
    if needed < found:
        raise DataError(
            f"{where} has {found - needed:,} bytes behind its array: save one array in a file"
        )


def header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the array is in Fortran order, and the dtype."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise ValueError("it does not begin as a NumPy file does") from None
    if version not in VERSIONS:
        raise ValueError(f"its format is of version {version[0]}.{version[1]}, not 1.0 to 3.0")
    of = np.lib.format
    read = of.read_array_header_2_0 if version > (1, 0) else of.read_array_header_1_0
    try:
        shape, fortran, dtype = read(file)
    except Exception as error:  # NumPy evaluates the header as Python, which may raise anything
        raise ValueError(f"its header is damaged: {error}") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"its header says shape {shape}")
    return shape, fortran, dtype


class _Flat(ArrayFile):
    """Numbers without gaps in a file."""

    def __init__(
        self,
        where: Where,
        dtype: Any,
        shape: tuple[int, ...],
        axis: int | None,
        begin: int,
        fortran: bool = False,
    ) -> None:
        super().__init__(where, dtype, shape, axis)
        self._shape, self._begin, self._order = shape, begin, "F" if fortran else "C"
        self._in_order = self.axis == 0 and not fortran
        if not self._in_order:  # rows lie among each other: take as many at once as memory allows
            self._chunk = max(1, SLAB_BYTES // 4 // self._row_bytes)

    def _rows(self, start: int, stop: int) -> Array:
        path, count = self.where.path, math.prod((stop - start, *self._rows_shape[1:]))
        if self._in_order:
            place = self._begin + start * self._row_bytes
            found = np.fromfile(path, self.dtype, count, offset=place)
            whole = len(found) == count
        else:
            # A mapped page that is no longer in the file would end the process.
            end = self._begin + self.dtype.itemsize * math.prod(self._shape)
            whole = os.stat(path).st_size >= end
        if not whole:
            raise DataError(f"{path} was cut off while it was being read")
        if self._in_order:
            return found.reshape(stop - start, *self._rows_shape[1:])
        shape: Any = self._shape
        stored = np.memmap(path, self.dtype, "r", self._begin, shape, self._order)  # type: ignore[call-overload]
        return np.array(self._cut(stored, start, stop))  # a copy, so that the map can be closed
