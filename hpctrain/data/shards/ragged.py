"""Samples of different lengths, end to end in one array: the values of a variable-length field.

values   a a a b b c c c c        (total, *shape)
offsets  0     3   5       9      int64 (n + 1,); sample i is values[offsets[i]:offsets[i+1]]
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.shards.types import Array, Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """`len(self)` samples of different lengths; see the module's picture."""

    values: Array
    offsets: Int64s

    @classmethod
    def of(cls, samples: Sequence[Array]) -> Self:
        """Join at least one sample, each (length, *shape)."""
        return cls(np.concatenate(samples), offsets_of([len(sample) for sample in samples]))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the samples of at least one part, one after the other."""
        if len(parts) == 1:
            return parts[0]
        offsets = offsets_of(np.concatenate([part.lengths for part in parts]))
        return cls(np.concatenate([part.values for part in parts]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        """Sample `i`, 0 to len - 1, without a copy: (length, *shape)."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> Int64s:
        """The length of each sample, int64 (n,)."""
        return np.diff(self.offsets)

    def rows(self, start: int, stop: int) -> Self:
        """Samples `start` to `stop`; the values are not copied."""
        offsets = self.offsets[start : stop + 1]
        return type(self)(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def pad(self) -> Array:
        """Return the samples as (n, longest, *shape), filled up with zeros."""
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        padded = np.zeros((len(self), longest, *self.values.shape[1:]), self.values.dtype)
        padded[np.arange(longest) < lengths[:, None]] = self.values
        return padded


def offsets_of(lengths: Sequence[int] | Int64s) -> Int64s:
    """Return where samples of these lengths begin, and where the last one ends: int64 (n + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


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
