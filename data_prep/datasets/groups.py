"""The values of a group field, such as a patient, in the splits of a data set."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from hpctrain.data.shards.ragged import Ragged, hash_rows
from hpctrain.data.shards.types import Array

_SHOWN = 40  # characters of a value


class Groups:
    """Notes which groups each split has."""

    def __init__(self, field: str) -> None:
        self.field = field
        self._found: dict[str, dict[int, str]] = {}  # by split: the hash of a value, and its text

    def add(self, split: str, values: Array | Ragged) -> None:
        """Note the values of some samples of a split."""
        keys, first = np.unique(hash_rows(values), return_index=True)
        known = self._found.setdefault(split, {})
        for key, row in zip(keys.tolist(), first.tolist(), strict=True):
            if key not in known:
                known[key] = _text(values[row])

    def merge(self, other: "Groups") -> None:
        """Add what another one has noted."""
        for split, found in other._found.items():
            self._found.setdefault(split, {}).update(found)

    def problems(self) -> Iterator[str]:
        """Yield a sentence on each two splits that share groups."""
        for one, other in combinations(self._found, 2):
            first, second = self._found[one], self._found[other]
            if both := [first[key] for key in first if key in second]:
                yield (
                    f"{len(both)} of {len(first | second)} values of {self.field!r} are in both "
                    f"{one!r} and {other!r}, such as {both[0]}"
                )


def _text(value: Array) -> str:
    if value.dtype == np.uint8 and value.ndim == 1:  # a text
        return repr(value.tobytes().decode("utf-8", "replace"))[:_SHOWN]
    return str(value.tolist())[:_SHOWN]
