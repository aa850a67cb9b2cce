"""Parts of a data set: chosen by indices, by a slice or by the values of a field.

>>> labels = Reader(folder, "train", fields=["label"])          # nothing else is read
>>> threes = np.flatnonzero(column(labels, "label") == 3)
>>> Subset(Order(len(threes), seed=0), threes)
>>> tenth = parse_slice("::10", len(labels))                    # a range: takes no memory
>>> Subset(Order(len(tenth), seed=0), tenth)
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.samplers.groups import first_seen
from hpctrain.data.samplers.order import Sampler
from hpctrain.data.shards.ragged import hash_rows
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import Source

CHUNK = 65_536  # samples read at a time


class Subset:
    """The samples with the given indices, and no others.

    The sampler says which number of [0, len(indices)) is at a position. An index that occurs twice
    is drawn twice. An array is stored as int32 if possible, a range as it is.
    """

    def __init__(self, sampler: Sampler, indices: NDArray[Any] | range) -> None:
        self.sampler, self.count = sampler, sampler.count
        if not isinstance(indices, range):
            indices = indices.astype(np.int32 if indices.max() < 2**31 else np.int64)
        self.indices = indices

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        chosen = self.sampler(epoch, positions)
        if not isinstance(self.indices, range):
            return self.indices[chosen].astype(np.int64)
        if chosen.size and chosen.max() >= len(self.indices):
            raise IndexError(f"index {chosen.max()} of a subset of {len(self.indices)} samples")
        return self.indices.start + chosen * self.indices.step


def _check_indices(indices: NDArray[Any], of: int) -> None:
    """Check that `indices` are at least one valid index of a data set of `of` samples."""
    if not isinstance(indices, np.ndarray) or indices.ndim != 1 or indices.dtype.kind not in "iu":
        found = type(indices).__name__
        if isinstance(indices, np.ndarray):
            found = f"{indices.dtype.name} {list(indices.shape)}"
        raise DataError(f"the indices of a subset are {found}; they are a list of integers")
    if not len(indices):
        raise DataError(f"a subset of {of} samples holds none of them")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= of:
        wrong = low if low < 0 else high
        raise DataError(f"a subset has the index {wrong}; the data set has 0 to {of - 1}")


def parse_subset(text: str, count: int) -> NDArray[Any] | range:
    """Return the indices that START:STOP:STEP selects of `count` samples, or those in FILE.npy."""
    if not text.endswith(".npy"):
        return parse_slice(text, count)
    try:
        indices: NDArray[Any] = np.load(text, allow_pickle=False)
    except FileNotFoundError:
        raise ConfigError("there is no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"it is no file of numpy.save with integers: {error}") from error
    _check_indices(indices, count)
    return indices


def parse_slice(text: str, count: int) -> range:
    """Return the one or more indices that START:STOP:STEP selects of `count`, as in Python."""
    match = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*(?::\s*(-?\d+)?\s*)?", text)
    parts = [int(part) if part else None for part in match.groups()] if match else [0]
    if parts[-1] == 0:
        raise ConfigError(f"{text!r} is no slice: it is START:STOP or START:STOP:STEP, STEP not 0")
    indices = range(count)[slice(*parts)]
    if not indices:
        raise ConfigError(f"the slice {text!r} of {count} samples holds none of them")
    return indices


def column(source: Source, name: str, chunk: int = CHUNK) -> Array:
    """Return a fixed-size field of all samples, (len(source), *shape), for labels and weights."""
    field = source.fields.get(name)
    if field is None or field.variable:
        fixed = [each for each, field in source.fields.items() if not field.variable]
        raise DataError(f"there is no fixed-size field {name!r}; there are {', '.join(fixed)}")
    values = np.empty((len(source), *field.shape), field.dtype)
    for start, rows in _scan(source, chunk):
        values[start : start + len(rows[name])] = rows[name]
    return values


def group_keys(source: Source, name: str, chunk: int = CHUNK) -> NDArray[np.uint64]:
    """Return a hash of any field of all samples, (n,): equal values have equal hashes."""
    return np.concatenate([hash_rows(rows[name]) for _, rows in _scan(source, chunk)])


def of_groups(text: str, keys: NDArray[np.uint64]) -> NDArray[Any]:
    """Return the samples of the groups that START:STOP:STEP selects, in ascending order.

    Groups count in the order in which they first come; `keys`, (n,), says which one a sample has.
    """
    numbers = first_seen(keys)
    chosen = np.asarray(parse_slice(text, int(numbers.max()) + 1))
    return np.flatnonzero(np.isin(numbers, chosen))


def _scan(source: Source, chunk: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield all samples in order, in chunks: the index of the first sample, and the fields."""
    for start in range(0, len(source), chunk):
        yield start, source.read(np.arange(start, min(start + chunk, len(source))))
