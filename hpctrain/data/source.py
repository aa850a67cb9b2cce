"""The interfaces between a loader and the source that it reads from."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from hpctrain.shards.field import Field
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array, Int64s


class Source(Protocol):
    """Samples by index: a `Reader`, or anything else with these three members."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The schema of what `read` returns."""

    def __len__(self) -> int: ...

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, int64 (n,), in that order; the arrays belong to the caller.

        `out` may have arrays (n, *shape) to fill, for some of the fixed-size fields.
        """


def fixed_size(
    fields: Mapping[str, Field], count: int, out: Mapping[str, Array] | None
) -> dict[str, Array]:
    """Return an array (count, *shape) for each fixed-size field: that of `out`, or a new one."""
    given = out or {}
    return {
        name: given[name] if name in given else np.empty((count, *field.shape), field.dtype)
        for name, field in fields.items()
        if not field.variable
    }


class SampleId(NamedTuple):
    """Where a sample is stored, for people and for reports.

    `file` is the shard, with the path or URL of its data set as the config has it, and `row` the
    number of the sample there. Of a window they are `FILE:DATASET` and its first element in that
    dataset.
    """

    file: str
    row: int


@runtime_checkable
class Traceable(Protocol):
    """A source that knows where its samples are stored."""

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """Return where the samples `indices`, int64 (n,), are stored. Nothing is read."""


def sample_ids(source: Source, indices: Int64s) -> list[SampleId]:
    """Return where samples are stored; of a source that does not know it, class and indices."""
    if isinstance(source, Traceable):
        return source.sample_ids(indices)
    return [SampleId(type(source).__name__, index) for index in indices.tolist()]


@runtime_checkable
class Prepares(Protocol):
    """A source that makes preparations when it knows which samples will be read."""

    def prepare(self, indices: Int64s) -> None:
        """Prepare for reading the samples `indices`, int64 (n,), soon; return without waiting."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A source whose blocks the operating system can read ahead."""

    def read_ahead(self, blocks: Int64s) -> None:
        """Start to read the ranges [first, end), int64 (k, 2), that the last call did not have."""


@runtime_checkable
class InBlocks(Protocol):
    """A sampler that goes through the index space in blocks."""

    def blocks(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the ranges [first, end) that the positions need, int64 (k, 2), in their order."""
