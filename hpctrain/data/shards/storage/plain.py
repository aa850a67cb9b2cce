"""Read rows of a contiguous dataset in large reads, for network file systems.

A memory map is poor there: a page fault reads little at a time, and a fault that fails ends the
process, while a read can be repeated. Rows that are near each other in the file, as those of a
block are, are one read: what is between them costs less than another read.
"""

from math import prod

import numpy as np

from hpctrain.data.shards.storage.file import File, reading
from hpctrain.data.shards.types import Array, Int64s

_RUN_BYTES = 8 * 2**20  # the largest read, about
_GAP_BYTES = 2**15  # rows that are closer to each other are read together


class Plain:
    """A contiguous dataset of native byte order, whose rows of `shape` begin at byte `offset`."""

    chunk_rows = 1

    def __init__(
        self, file: File, name: str, offset: int, dtype: str, shape: tuple[int, ...]
    ) -> None:
        self._file, self._name, self._offset = file, name, offset
        self._dtype, self._shape = np.dtype(dtype), shape
        self._row = self._dtype.itemsize * prod(shape)

    def rows(self, rows: Int64s) -> Array:
        """Return rows in the given order, repeats allowed: (n, *shape)."""
        out = np.empty((len(rows), *self._shape), self._dtype)
        order = np.argsort(rows, kind="stable")
        starts = rows[order] * self._row
        apart = (np.diff(starts) > _GAP_BYTES + self._row) | (np.diff(starts // _RUN_BYTES) != 0)
        for part in np.split(order, np.flatnonzero(apart) + 1) if len(rows) else []:
            first, stop = int(rows[part[0]]), int(rows[part[-1]]) + 1
            run = np.empty((stop - first, *self._shape), self._dtype)
            self.copy(first, stop, run)
            out[part] = run[rows[part] - first]
        return out

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy the rows from `start` to `stop` into `out`, (stop - start, *shape), contiguous."""
        with reading(self._file.path, self._name, start, stop - 1):
            flat = out.reshape(-1).view(np.uint8)
            self._file.read(self._offset + start * self._row, flat)

    def prefetch(self, rows: Int64s) -> None:
        """Let the kernel read consecutive rows ahead."""
        size = len(rows) * self._row
        self._file.will_need(self._offset + int(rows[0]) * self._row, size)
