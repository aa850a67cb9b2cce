"""What the decoders of HDF5's filters have in common; see `hpctrain.data.storage.codecs`."""

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# (stored bytes, size of what comes out, where to write it if there) -> what comes out
Stage = Callable[[Bytes, int, Bytes | None], Bytes]
Errors = tuple[type[Exception], ...]  # what a library raises on bytes that it cannot decode


class Undecodable(Exception):
    """Only HDF5 itself can decode this; the message says why."""


class Damaged(Exception):
    """The stored bytes are not what was written; the message says how."""


def load(name: str) -> Any:
    """Import a library.

    Raises:
        Undecodable: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Undecodable(f"the Python package {name.split('.')[0]} is not installed") from None


class _Scratch(threading.local):
    """This thread's buffers, by use. New memory for each chunk costs more than to decode LZ4."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def __call__(self, use: str, nbytes: int) -> Bytes:
        """Return uint8 (nbytes,), whose content lasts until the next call for this use."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


scratch = _Scratch()
