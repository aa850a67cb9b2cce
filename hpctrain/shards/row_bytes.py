"""The bytes of each sample of a field, and their hashes: samples with equal values have equal ones.

>>> hash_rows(np.array([7, 8, 7]))            # uint64 (3,); the first and the last are equal
"""

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array


def row_bytes(values: Array | Ragged) -> list[bytes]:
    """Return the bytes of each row; those of a sequence begin with its length."""
    if isinstance(values, Ragged):
        return [len(sample).to_bytes(8, "little") + sample.tobytes() for sample in values]
    rows = np.ascontiguousarray(values).reshape(len(values), -1)
    width = rows.itemsize * rows.shape[1]
    if width >= 2**31:
        return [row.tobytes() for row in rows]
    # All in one call, because a loop over many rows is slow.
    found: list[bytes] = rows.view(f"V{width}").reshape(-1).tolist()
    return found


def hash_keys(keys: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return the 64-bit hash of each key, (n,)."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64)


def hash_rows(values: Array | Ragged) -> NDArray[np.uint64]:
    """Return the 64-bit hash of each sample's value, (n,)."""
    return hash_keys(row_bytes(values))
