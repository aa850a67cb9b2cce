"""The shards of a data set: how samples are divided over files (`hpctrain.data.shards.shard`).

- A file is named SPLIT-00000.h5. It holds as many samples as fit in `max_bytes` of data, and at
  least one.
- The same samples in the same order give the same bytes, whatever the batches were: no times are
  stored, and the layout is the oldest that HDF5 writes. The versions of HDF5 and of the codecs
  must be the same.

A data set appears all at once: shards are written and synced in `OUT/.hpctrain-partial/`, then
moved into OUT, and `index.json` last. A writer that is killed leaves that folder, which the next
one clears; a writer that raises leaves nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.writing.commit import writable
from data_prep.writing.compression import Compression, write_compressed
from data_prep.writing.moments import Moments
from data_prep.writing.sample_schema import sample_nbytes
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.shard import shard_name, write_shard
from hpctrain.data.shards.types import Array


class ShardFiles:
    """Writes samples into shards in one folder, and nothing else: no index, no lock.

    It takes the memory of about a shard for each split; a compressed shard takes two more while it
    is written. `max_bytes` is the data in one shard, before it is compressed. The caller forces the
    shards to the disk.
    """

    def __init__(
        self, folder: Path, fields: Mapping[str, Field], max_bytes: int, compression: Compression
    ) -> None:
        self._folder, self._max_bytes, self._compression = folder, max_bytes, compression
        self._fields = fields
        self._splits: dict[str, _Split] = {}

    def add(self, split: str, rows: Mapping[str, Array | Ragged]) -> None:
        """Append a copy of at least one sample, which fits the schema, to `split`.

        A field is (n, *shape); a variable-length one is a `Ragged`. See `sample_schema`.
        """
        state = self._splits.setdefault(split, _Split(split))
        ends = np.cumsum(sample_nbytes(rows, self._fields))
        start, before = 0, 0
        while start < len(ends):
            room = self._max_bytes - state.bytes
            stop = int(np.searchsorted(ends, before + room, side="right"))
            if state.count == 0:
                stop = max(stop, start + 1)  # a sample larger than a shard is a shard
            if stop > start:
                state.append(
                    {name: _part(value, start, stop) for name, value in rows.items()},
                    int(ends[stop - 1]) - before,
                )
                start, before = stop, int(ends[stop - 1])
            if start < len(ends):
                self._flush(state)

    def finish(self) -> tuple[list[Shard], dict[str, dict[str, Moments]]]:
        """Write what is left; return the shards and, by split and field, the statistics."""
        for state in self._splits.values():
            if state.count:
                self._flush(state)
        shards = [shard for state in self._splits.values() for shard in state.shards]
        return shards, {state.name: state.moments for state in self._splits.values()}

    def _flush(self, state: "_Split") -> None:
        """Write a split's samples as its next shard."""
        path = self._folder / shard_name(state.name, len(state.shards))
        content = path, state.name, self._fields, state.parts
        with writable(path):
            if self._compression.codec == "none":
                size, digest = write_shard(*content, sync=False)
            else:
                size, digest = write_compressed(*content, self._compression)
        elements = {
            name: sum(len(part.values) for part in parts)
            for name, parts in state.parts.items()
            if self._fields[name].variable
        }
        state.shards.append(Shard(path.name, state.name, state.count, size, digest, elements))
        state.clear()


class _Split:
    """The finished shards of a split, and the samples that wait for the next shard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shards: list[Shard] = []
        self.moments: dict[str, Moments] = {}
        self.clear()

    def clear(self) -> None:
        self.parts: dict[str, list[Any]] = {}
        self.count, self.bytes = 0, 0

    def append(self, rows: Mapping[str, Array | Ragged], nbytes: int) -> None:
        for name, value in rows.items():
            self.parts.setdefault(name, []).append(value)
            self.moments.setdefault(name, Moments.among(len(rows))).add(value)
        self.count += len(next(iter(rows.values())))
        self.bytes += nbytes


def _part(value: Array | Ragged, start: int, stop: int) -> Array | Ragged:
    """Return a copy of the samples `start` to `stop`."""
    if not isinstance(value, Ragged):
        return np.array(value[start:stop], order="C")
    rows = value.rows(start, stop)
    return Ragged(np.array(rows.values, order="C"), rows.offsets)
