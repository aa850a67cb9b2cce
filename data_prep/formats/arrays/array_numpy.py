"""Arrays in .npy files; see `array_base`."""

import os
from contextlib import ExitStack
from typing import Any

import numpy as np

from data_prep.formats.arrays.array_base import SLAB_BYTES, ArrayFile, Where, check_dtype
from hpctrain.data.shards.types import Array
from hpctrain.errors import ConfigError, DataError


def open_npy(where: Where, axis: int | None, opened: ExitStack) -> ArrayFile:
    """Open a .npy file, which is mapped into memory."""
    if where.key:
        raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
    array = np.lib.format.open_memmap(where.path, "r")
    check_dtype(where, array.dtype)
    found = os.stat(where.path).st_size - int(array.offset)
    if found != array.nbytes:
        raise DataError(
            f"{where}: its header says {array.nbytes:,} bytes of data, {found:,} are there; a file "
            "that is whole has one array"
        )
    return _Mapped(where, array, axis)


class _Mapped(ArrayFile):
    """A .npy file."""

    def __init__(self, where: Where, array: "np.memmap[Any, Any]", axis: int | None) -> None:
        super().__init__(where, array.dtype, array.shape, axis)
        self._array, self._end = array, int(array.offset) + array.nbytes
        if self.axis or not array.flags.c_contiguous:
            # Rows lie among each other: take as many at once as memory allows.
            self._chunk = max(1, SLAB_BYTES // 4 // self._row_bytes)

    def _rows(self, start: int, stop: int) -> Array:
        # A mapped page that is no longer in the file would end the process.
        if os.stat(self.where.path).st_size < self._end:
            raise DataError(f"{self.where.path} was cut off while it was being read")
        return np.array(self._cut(self._array, start, stop))  # a copy
