"""Types, errors and buffers that the decoders of HDF5's filters share.

See `hpctrain.data.shards.storage.codecs`.
"""

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# (stored bytes, bytes of the result, buffer for the result or None) -> result
Stage = Callable[[Bytes, int, Bytes | None], Bytes]
Errors = tuple[type[Exception], ...]  # what a library raises for bytes that it cannot decode


class Undecodable(Exception):
    """Only HDF5 itself can decode a dataset; the message says why."""


class Damaged(Exception):
    """The stored bytes are not those that were written; the message says in which way."""


def load(name: str) -> Any:
    """Import a library; Undecodable if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Undecodable(f"the Python package {name.split('.')[0]} is not installed") from None


class _Scratch(threading.local):
    """The buffers of a thread, by use. New memory per chunk would cost more than decoding LZ4."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def __call__(self, use: str, nbytes: int) -> Bytes:
        """Return uint8 (nbytes,). Its content is valid until the next call for the same use."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


scratch = _Scratch()
