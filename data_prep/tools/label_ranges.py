"""The labels of a data set, compared with their classes: each wrong one trains in silence or fails.

categories of the index     label: ["cat", "dog"]           labels are 0 and 1
--labels FIELD=CLASSES      --labels pixels=21                 labels are 0 to 20
--ignore VALUE              --ignore 255                     what `task.ignore` leaves out
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.errors import DataError
from hpctrain.shards.index import Index
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array

OPTIONS = """
--labels FIELD=CLASSES ...
    the values of this field are 0 to CLASSES - 1, such as label=10; a field with categories has as
    many classes as these
--ignore VALUE ... : int
    a label that does not count, as task.ignore, such as -100 or 255
"""


def label_counts(index: Index, given: Sequence[str]) -> dict[str, int]:
    """Return the number of classes of each field that has labels."""
    counts = {name: len(names) for name, names in index.categories.items()}
    for text in given:
        name, _, count = text.partition("=")
        if name not in index.fields or not count.isdecimal() or int(count) < 1:
            raise DataError(
                f"--labels {text}: it is FIELD=CLASSES, such as label=10; the fields are "
                f"{', '.join(index.fields)}"
            )
        counts[name] = int(count)
    return counts


@dataclass
class LabelRanges:
    """Finds the labels of a shard that are outside their range."""

    counts: Mapping[str, int]  # the number of classes of each field that has labels
    ignore: Sequence[int] = ()  # labels that do not count
    _first: dict[str, tuple[int, float]] = field(default_factory=dict)
    _found: dict[str, int] = field(default_factory=dict)

    def of_shard(self) -> "LabelRanges":
        """Return one that has seen nothing, for another shard."""
        return LabelRanges(self.counts, self.ignore)

    def add(self, name: str, samples: Array | Ragged, start: int) -> None:
        """Look at samples of a field, of which the first is the row `start` of the shard."""
        if name not in self.counts:
            return
        values = samples.values if isinstance(samples, Ragged) else samples
        wrong = ~((values >= 0) & (values < self.counts[name]))
        if not wrong.any():
            return
        wrong &= ~np.isin(values, self.ignore)
        places = np.flatnonzero(wrong.any(tuple(range(1, wrong.ndim))))
        if not len(places):
            return
        row = int(places[0])
        if isinstance(samples, Ragged):
            row = int(np.searchsorted(samples.offsets, row, "right")) - 1
        self._first.setdefault(name, (start + row, values[wrong].reshape(-1)[0].item()))
        self._found[name] = self._found.get(name, 0) + int(wrong.sum())

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with each field."""
        for name, (row, value) in self._first.items():
            more = self._found[name] - 1
            also = f", and {more} more are outside" if more else ""
            yield (
                f"{name}: row {row} is {value:g}{also}; its labels are 0 to "
                f"{self.counts[name] - 1}. If such samples shall not count, train with "
                f"task.ignore={value:g}, and --verify with --ignore {value:g}"
            )
