"""Parts of a data set: by index, by slice, by what the samples are.

    >>> labels = Reader(folder, "train", fields=["label"])          # nothing else is read
    >>> chosen = select(labels, lambda rows: rows["label"] == 3)
    >>> Subset(Order(len(chosen), seed=0), chosen, of=len(labels))
    >>> tenth = parse_slice("::10", len(labels))                    # a range: no memory
    >>> Subset(Order(len(tenth), seed=0), tenth, of=len(labels))
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.loader import Source
from hpctrain.data.order import Sampler
from hpctrain.data.permutation import Int64s
from hpctrain.data.ragged import Array, Ragged
from hpctrain.errors import DataError

CHUNK = 65_536  # samples read at a time

Rows = Mapping[str, Array | Ragged]


class Subset:
    """The samples `indices`, in the order that `sampler` gives to so many.

    Args:
        sampler: An order of [0, len(indices)): shuffled or not, by blocks, repeated, …
        indices: Of the samples; a repeated one comes as often. An array is kept as int32 where
            they fit, a range as it is.
        of: Number of samples of the data set.

    Raises:
        DataError: No index, one outside the data set, or a sampler of another number.
    """

    def __init__(self, sampler: Sampler, indices: NDArray[Any] | range, of: int) -> None:
        if not isinstance(indices, range):
            indices = _compact(indices, of)
        if not len(indices):
            raise DataError(f"a subset of {of} samples holds none of them")
        low, high = int(min(indices[0], indices[-1])), int(max(indices[0], indices[-1]))
        if not isinstance(indices, range):
            low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= of:
            outside = low if low < 0 else high
            raise DataError(f"a subset asks for sample {outside}; there are 0 to {of - 1}")
        self.sampler, self.indices, self.count = sampler, indices, sampler.count
