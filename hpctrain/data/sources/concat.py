"""Several data sets, read as if they were joined end to end.

    >>> both = Concat({"old": Reader(old, "train"), "new": Reader(new, "train")})
    >>> both.read(np.array([0, len(both) - 1]))          # the first of old, the last of new

`hpctrain.data.samplers.mixture` draws from these indices by weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.samplers.order import EndToEnd
from hpctrain.data.samplers.permutation import groups
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import SampleId, Source, new_arrays


class Concat(Source):
    """The samples of the first source, then those of the next; all have the same fields."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        (first, source), *others = sources.items()
        for name, other in others:
            _check(first, source.fields, name, other.fields)
        self.fields: Mapping[str, Field] = source.fields
        self._sources = list(sources.values())
        self._samples = EndToEnd([len(source) for source in self._sources])

    def __len__(self) -> int:
        return len(self._samples)

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, in that order; see `hpctrain.data.source.Source`."""
        parts = list(self._parts(indices))
        if len(parts) < 2:  # no copy is needed; an empty read goes to the first source
            source, own, _ = parts[0] if parts else (self._sources[0], indices, slice(0))
            found = source.read(own, out)
            return {name: found[name] for name in self.fields}
        read = [(rows, source.read(own)) for source, own, rows in parts]
        fixed = new_arrays(self.fields, indices.size) if out is None else out
        joined: dict[str, Array | Ragged] = {}
        for name in self.fields:
            pieces = [(rows, part[name]) for rows, part in read]
            if name not in fixed:
                joined[name] = _join_ragged(pieces, indices.size)
                continue
            joined[name] = array = fixed[name]
            for rows, piece in pieces:
                array[rows] = piece
        return joined

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """See `Source`."""
        found: dict[int, SampleId] = {}
        places = np.arange(len(indices))
        for source, own, rows in self._parts(indices):
            found.update(zip(places[rows].tolist(), source.sample_ids(own), strict=True))
        return [found[place] for place in range(len(indices))]

    def prepare(self, indices: Int64s) -> None:
        """See `Source`."""
        for source, own, _ in self._parts(indices):
            source.prepare(own)

    def _parts(self, indices: Int64s) -> Iterator[tuple[Source, Int64s, slice | Int64s]]:
        """Yield each source that has some: its own indices, and its rows of the result."""
        numbers, own = self._samples.locate(indices)
        for number, rows in groups(numbers):
            yield self._sources[number], own[rows], rows


Parts = Sequence[tuple[slice | Int64s, Any]]  # rows of the result, and the samples of these rows


def _join_ragged(parts: Parts, count: int) -> Ragged:
    offsets = np.zeros(count + 1, np.int64)
    for rows, part in parts:
        offsets[1:][rows] = part.lengths
    np.cumsum(offsets, out=offsets)
    like = parts[0][1].values
    values = np.empty((int(offsets[-1]), *like.shape[1:]), like.dtype)
    for rows, part in parts:  # all elements of a sample move equally far
        moves = np.repeat(offsets[:-1][rows] - part.offsets[:-1], part.lengths)
        values[moves + np.arange(len(part.values))] = part.values
    return Ragged(values, offsets)


def _check(
    first: str, fields: Mapping[str, Field], second: str, others: Mapping[str, Field]
) -> None:
    for name in (*fields, *others):
        if fields.get(name) != others.get(name):
            one, other = (
                f"{data_set!r} has {known.get(name, 'none')}"
                for data_set, known in ((first, fields), (second, others))
            )
            raise DataError(
                f"field {name!r}: {one}, {other}. Data sets that are read as one have the same "
                "fields; choose some with `fields`, or convert one"
            )
