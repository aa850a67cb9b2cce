"""Read-only memory maps of files that return an error when the file has been cut off.

Reading mapped pages that are no longer in the file ends the process with SIGBUS. Therefore the
pages are first loaded by a system call that returns an error instead (MADV_POPULATE_READ, Linux
5.14). A file that is cut off after that call and before the bytes are written makes `write` fail,
not the process. The map saves a copy: an .npy of 1 GB converts about twice as fast.
"""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.places.filesystem import kind_of

POPULATE_READ = 22  # an advice of madvise(2); Python has no name for it yet
LEAST_BYTES = 2**16  # smaller reads are as fast with a copy


class Mapped:
    """A memory map of a file, where the system and the file system allow one."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._map: mmap.mmap | None = None
        # A network file system would load mapped pages one by one; large reads are faster there.
        if os.fstat(descriptor).st_size >= LEAST_BYTES and kind_of(Path(path)) != "network":
            try:
                self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._map.madvise(POPULATE_READ, 0, 1)
            except (OSError, ValueError):  # an older system, or not an ordinary file
                self._map = None

    def bytes(self, start: int, size: int) -> NDArray[np.uint8] | None:
        """Return bytes of the file, read-only; None if the caller has to read them itself."""
        if self._map is None or size < LEAST_BYTES:
            return None
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(POPULATE_READ, page, start + size - page)
        return np.frombuffer(self._map, np.uint8, size, start)
