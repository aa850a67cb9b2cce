"""Read samples of a data set as a training does, for the commands that look at one.

Nothing is mapped, so that torch is not needed. Each shard is compared with the index before samples
are read from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.source import BLOCK_BYTES
from data_prep.writing.moments import Moments
from hpctrain.base.errors import DataError
from hpctrain.data.shards import index as index_file
from hpctrain.data.shards.field import Field, name_problem
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array
from hpctrain.data.sources.reader import Reader


def load(folder: Path) -> Index:
    """Return the index of a data set, which lists something, with names that are portable."""
    index = Index.load(folder)
    names = [*((name, "field") for name in index.fields), *((s, "split") for s in index.splits)]
    problem = next(filter(None, (name_problem(*each) for each in names)), "")
    if not index.fields or not index.shards:
        problem = f"it lists no {'shards' if index.fields else 'fields'}"
    if problem:
        raise DataError(f"{folder}/{index_file.FILE} is damaged: {problem}")
    return index


def reader_of(folder: Path | str, fields: Mapping[str, Field], shards: Sequence[Shard]) -> Reader:
    """Return a reader of one or more shards, which may be of several splits."""
    together = tuple(replace(shard, split="all") for shard in shards)
    return Reader(folder, "all", index=Index(fields, together), mapped=False)


def blocks(
    reader: Reader, start: int, stop: int
) -> Iterator[tuple[int, dict[str, Array | Ragged]]]:
    """Yield (first, samples) for the samples `start` to `stop`, in blocks of a few MB."""
    fixed = sum(field.nbytes for field in reader.fields.values() if not field.variable)
    step = max(1, BLOCK_BYTES // max(8, fixed))
    while start < stop:
        samples = np.arange(start, min(start + step, stop))
        sizes = np.full(len(samples), fixed)
        for name, field in reader.fields.items():
            if field.variable:
                sizes += reader.lengths(name, samples) * field.nbytes
        count = max(1, int(np.searchsorted(np.cumsum(sizes), BLOCK_BYTES, side="right")))
        yield start, reader.read(samples[:count])
        start += count


def moments_of(
    folder: Path | str,
    fields: Mapping[str, Field],
    shard: Shard,
    note: Callable[[Mapping[str, Array | Ragged]], None] = lambda _: None,
) -> dict[str, Moments]:
    """Read all samples of a shard; return the statistics of each field. `note` sees each block."""
    moments = {name: Moments.among(len(fields)) for name in fields}
    for _, rows in blocks(reader_of(folder, fields, [shard]), 0, shard.count):
        note(rows)
        for name, values in rows.items():
            moments[name].add(values)
    return moments
