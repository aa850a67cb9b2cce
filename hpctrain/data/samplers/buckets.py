"""Length buckets: samples of similar length come together, so that batches need little padding.

    of the sampler   windows of `window` positions      7 2 9 4 8 1 3 6 | 5 …     (lengths)
    in a window      sorted by length                   1 2 3 4 6 7 8 9
                     cut into units of `size`           1 2 | 3 4 | 6 7 | 8 9
                     units shuffled                     6 7 | 1 2 | 8 9 | 3 4

A batch should consist of whole units. The sequence does not depend on the batch size: runs with
batches of 2 and of 4 units see the same units in the same order.

    >>> lengths = np.diff(offsets)                               # of every sample
    >>> Buckets(Order(10**6, seed=0), lengths.__getitem__, window=6400, size=64, seed=0)
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from hpctrain.data.samplers.order import Sampler, check_positions
from hpctrain.data.samplers.permutation import groups, make_key, permute
from hpctrain.data.shards.types import Int64s

_CACHE_BYTES = 32 * 2**20  # of kept windows; at least two are kept


class Buckets:
    """The samples of `sampler`, sorted by length in each window, with the units of it shuffled.

    A window has whole units: it is a multiple of `size`.

    If the last window cannot be divided into whole units of `size`, its last samples in the order
    of the sampler, of any length, form a shorter unit at the end. `lengths` returns those of the
    samples of a whole window. A hundred units in a window need little padding and still mix the
    samples.
    """

    def __init__(
        self,
        sampler: Sampler,
        lengths: Callable[[Int64s], Int64s],
        window: int,
        size: int,
        seed: int = 0,
    ) -> None:
        self.sampler, self.lengths, self.count = sampler, lengths, sampler.count
        self.window, self.size, self.seed = window, size, seed
        keep = max(2, min(64, _CACHE_BYTES // (8 * window)))
        self._table = lru_cache(keep)(self._sorted)  # the samples of a window

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        windows, offsets = np.divmod(check_positions(positions, self.count), self.window)
        samples = np.empty_like(offsets)
        for window, rows in groups(windows):
            samples[rows] = self._table(epoch, window)[offsets[rows]]
        return samples

    def _sorted(self, epoch: int, window: int) -> Int64s:
        """Return the samples of a window, in their final order."""
        start = window * self.window
        stop = min(start + self.window, self.count)
        table = self.sampler(epoch, np.arange(start, stop))
        lengths = self.lengths(table)
        units = len(table) // self.size
        if units:
            whole = units * self.size
            order = np.argsort(lengths[:whole], kind="stable").reshape(units, self.size)
            key = make_key(self.seed, epoch, window, self.count)
            shuffled = permute(units, key, np.arange(units))
            table[:whole] = table[order[shuffled].ravel()]
        return table
