"""A file's bytes without a copy of them, where a file that is cut off meanwhile is still an error.

Reading what is mapped and no longer there ends the process (SIGBUS). So the pages are brought in
first, by a call that returns an error instead (MADV_POPULATE_READ, Linux 5.14). What is left is
the moment until they are used; `write` returns an error of its own.
"""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.places.filesystem import kind_of

POPULATE_READ = 22  # of madvise(2); Python has no name for it yet
LEAST_BYTES = 2**16  # less is copied as fast


class Mapped:
    """A file's bytes.

    Args:
        path: Of the file.
        descriptor: Of the same file, open; it may be closed afterwards.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._map: mmap.mmap | None = None
        # Others' pages come over the network one by one; large reads do not.
        if os.fstat(descriptor).st_size >= LEAST_BYTES and kind_of(Path(path)) != "network":
            try:
                self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._map.madvise(POPULATE_READ, 0, 1)
            except (OSError, ValueError):  # an older system, or no ordinary file
                self._map = None

    def bytes(self, start: int, size: int) -> NDArray[np.uint8] | None:
        """Return bytes of the file, read-only; None: they have to be read.

        Raises:
            OSError: They are not there any more, or cannot be read.
        """
        if self._map is None or size < LEAST_BYTES:
            return None
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(POPULATE_READ, page, start + size - page)
        return np.frombuffer(self._map, np.uint8, size, start)
