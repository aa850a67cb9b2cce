"""The interfaces between a loader and the source that it reads from."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s


class SampleId(NamedTuple):
    """Where a sample is stored, for people and for reports.

    `file` is the shard, with the path or URL of its data set as the config has it, and `row` the
    number of the sample there. Of a window they are `FILE:DATASET` and its first element in that
    dataset.
    """

    file: str
    row: int


class Source(Protocol):
    """Samples by index: a `Reader`, or anything else that has `fields`, a length and `read`."""

    fields: Mapping[str, Field]
    """The schema of what `read` returns."""

    def __len__(self) -> int: ...

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, int64 (n,), in that order; the arrays belong to the caller.

        `out` may have arrays (n, *shape) to fill, for all of the fixed-size fields.
        """

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """Return where samples are stored; if that is not known, class and indices."""
        return [SampleId(type(self).__name__, index) for index in indices.tolist()]

    def prepare(self, indices: Int64s) -> None:
        """Prepare for reading the samples `indices`, int64 (n,), soon; return without waiting."""
        return

    def read_ahead(self, blocks: Int64s) -> None:
        """Start to read the ranges [first, end), int64 (k, 2), that the last call did not have."""
        return


def new_arrays(
    fields: Mapping[str, Field],
    count: int,
    take: Callable[[tuple[int, ...], str], Array] = np.empty,
) -> dict[str, Array]:
    """Return an array (count, *shape) for each fixed-size field, as `take` gives one."""
    return {
        name: take((count, *field.shape), field.dtype)
        for name, field in fields.items()
        if not field.variable
    }
