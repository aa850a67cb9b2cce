"""Sampling by class: a pure function of the position, like an order.

Each aligned run of n_classes positions (0 to n_classes - 1, …) has one sample of each class; within
a class, no sample comes again until all have come.

>>> Balanced(column(reader, "label"), seed=0)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.samplers.order import check_positions
from hpctrain.data.samplers.permutation import groups, make_key, permute_each
from hpctrain.data.shards.types import Int64s


class Balanced:
    """Draws each class equally often, and within a class each sample equally often.

    Draw k of a class of n samples is position k % n of the class's own order number k // n, over
    all epochs. Memory: 4 or 8 bytes per sample. The labels are any integers, (n,), and `classes`
    the distinct ones. An epoch has as many positions as the largest multiple of the classes
    up to n.
    """

    def __init__(self, labels: NDArray[Any], seed: int) -> None:
        self.classes, sizes = np.unique(labels, return_counts=True)
        small = np.int32 if len(labels) <= 2**31 else np.int64
        self._members = np.argsort(labels, kind="stable").astype(small)  # class by class
        self._starts, self._sizes = np.cumsum(sizes) - sizes, sizes
        classes = len(self.classes)
        self.count = len(labels) // classes * classes
        self._keys = [make_key(seed, which, self.count, len(labels)) for which in range(2)]

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        classes = len(self.classes)
        turns, within = np.divmod(check_positions(positions, self.count), classes)
        # From here on `turns` counts over all epochs. It is also the draw number in each class.
        turns += epoch * (self.count // classes)
        chosen = permute_each(classes, self._keys[0], turns, within)
        places = np.empty_like(turns)
        for size, rows in groups(self._sizes[chosen]):
            passes, draws = np.divmod(turns[rows], size)
            orders = passes * classes + chosen[rows]  # one order per class and pass
            places[rows] = permute_each(size, self._keys[1], orders, draws)
        samples: Int64s = self._members[self._starts[chosen] + places].astype(np.int64)
        return samples
