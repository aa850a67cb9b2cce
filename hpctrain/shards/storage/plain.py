"""Read rows of a contiguous dataset in large reads, for network file systems.

A memory map is poor there: a page fault reads little at a time, and a fault that fails ends the
process, while a read can be repeated. Rows that follow each other in the file, as those of a block
do, are one read.
"""

from math import prod

import numpy as np

from hpctrain.shards.storage.file import File, reading
from hpctrain.shards.types import Array, Int64s

_RUN_BYTES = 8 * 2**20  # the largest read


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
        step = np.diff(rows[order])
        for part in np.split(order, np.flatnonzero(step != 1) + 1) if len(rows) else []:
            size = max(1, _RUN_BYTES // self._row)
            for first in range(0, len(part), size):
                these = part[first : first + size]
                start = int(rows[these[0]])
                if len(these) == 1:
                    self.copy(start, start + 1, out[these[0] : these[0] + 1])
                else:
                    run = np.empty((len(these), *self._shape), self._dtype)
                    self.copy(start, start + len(these), run)
                    out[these] = run
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
