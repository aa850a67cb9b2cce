"""What a loader reads from, and what it may tell it beforehand."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from hpctrain.data.field import Field
from hpctrain.data.ragged import Ragged
from hpctrain.data.types import Array, Int64s


class Source(Protocol):
    """Samples by index: a `Reader`, or anything with the same three."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The schema of what `read` returns."""

    def __len__(self) -> int: ...

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, in that order, in arrays that belong to the caller.

        `out` may have arrays (n, *shape) to fill, for some of the fixed-size fields.
        """


@runtime_checkable
class Prepares(Protocol):
    """A source that can use to know what will be read."""

    def prepare(self, indices: Int64s) -> None:
        """The samples `indices`, int64 (n,), are read soon; return without waiting for them."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A source whose blocks the system can read ahead."""

    def read_ahead(self, blocks: Int64s) -> None:
        """Have the ranges [first, end), int64 (k, 2), read in this order; do not wait for them.

        Each is begun once, though it comes again in the next call.
        """


@runtime_checkable
class InBlocks(Protocol):
    """A sampler that goes through the index space in blocks."""

    def blocks(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the ranges [first, end) that positions need, int64 (k, 2), in order of need."""
