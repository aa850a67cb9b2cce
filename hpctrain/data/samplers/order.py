"""The order of samples: a pure function of (seed, epoch, position), in O(1) memory.

`torch.randperm(5e8)` takes 37 s and 4 GB on every rank, so each position is mapped on its own (see
`hpctrain.data.samplers.permutation`). The global batch of a step consists of the samples at its
positions: it is the same for any number of ranks and workers, and after a restart.

    >>> order = Order(count=10**10, seed=0)
    >>> order(epoch=3, positions=np.arange(4))      # the first four samples of epoch 3

The values never change, because resumed runs depend on them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.samplers.permutation import MAX_COUNT, groups, make_key, permute
from hpctrain.data.shards.types import Int64s


class Sampler(Protocol):
    """Says which sample is at a position: a pure function, the same on every rank.

    A call takes some tenths of a millisecond even for few positions, so pass thousands.
    """

    @property
    def count(self) -> int:
        """Number of positions in one epoch."""

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples, int64 (n,), at the `positions`, each in [0, count), of `epoch`."""


class Order:
    """A permutation of [0, count) for each epoch, count <= 2^62; without `shuffle` the identity."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise DataError(f"an order needs 1 to 2^62 samples, not {count}")
        self.count, self.seed, self.shuffle = count, seed, shuffle

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        return self._map(epoch, positions, inverse=False)

    def inverse(self, epoch: int, indices: Int64s) -> Int64s:
        """Return the positions of the samples `indices` in `epoch`."""
        return self._map(epoch, indices, inverse=True)

    def _map(self, epoch: int, values: Int64s, *, inverse: bool) -> Int64s:
        values = check_positions(values, self.count)
        if not self.shuffle:
            return values.copy()
        return permute(self.count, make_key(self.seed, epoch, self.count), values, inverse=inverse)


class Repeat:
    """Every sample `times` times per epoch: several epochs of `sampler`, one after the other."""

    def __init__(self, sampler: Sampler, times: int) -> None:
        self.sampler, self.times = sampler, times
        self.count = sampler.count * times

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        return draw(self.sampler, epoch * self.times, check_positions(positions, self.count))


def draw(sampler: Sampler, epoch: int, draws: Int64s) -> Int64s:
    """Return the samples of `draws`, counted from the beginning of `epoch` through later epochs."""
    epochs, positions = np.divmod(draws, sampler.count)
    samples = np.empty_like(positions)
    for passed, rows in groups(epochs):
        samples[rows] = sampler(epoch + passed, positions[rows])
    return samples


def check_positions(
    positions: Int64s, count: int, what: str = "positions", of: str = "samples"
) -> Int64s:
    """Return the positions as int64; an IndexError if one is not in [0, count)."""
    positions = np.asarray(positions, dtype=np.int64)
    # As unsigned numbers, negative ones are larger than all others.
    if positions.size and positions.view(np.uint64).max() >= count:
        raise IndexError(f"{what} {positions.min()} to {positions.max()} of {count} {of}")
    return positions


class EndToEnd:
    """Where an index lies in the shards of a split, or other pieces, given their `counts`.

    Piece i has the indices from `firsts[i]` to `ends[i]`.
    """

    def __init__(self, counts: Sequence[int] | Int64s) -> None:
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.firsts: Int64s = self.ends - np.asarray(counts, np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def pieces(self, indices: Int64s) -> Int64s:
        """Return the piece of each index."""
        return np.searchsorted(self.ends, indices, side="right")

    def locate(self, indices: Int64s, of: str = "samples") -> tuple[Int64s, Int64s]:
        """Return the piece of each index, and its place there; an IndexError if there is none."""
        indices = check_positions(indices, len(self), "indices", of)
        if len(self.ends) == 1:
            return np.zeros(len(indices), np.int64), indices
        pieces = self.pieces(indices)
        return pieces, indices - self.firsts[pieces]
