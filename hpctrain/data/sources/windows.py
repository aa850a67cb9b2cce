"""Windows of equal length, cut from a variable-length field such as texts of tokens.

    values     a a a a b b c c c c c c d d          of one shard, documents end to end
    windows    └──0──┘ └──1──┘ └──2──┘              length 4, stride 4: the last 2 are left out
    documents  0 0 0 0 0 0 1 1 0 0 0 0

A window may go over the end of a document, but not of a shard: elements at the end of a shard that
do not fill a window are left out. For language models take length = context + 1 and stride =
context: every token but the first of a shard is predicted once.

    >>> windows = Windows(Reader(Path("data/text"), "train"), "text", length=1025)
    >>> Loader(windows, global_batch_size=16)
"""

from collections.abc import Mapping
from functools import lru_cache, partial

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.samplers.order import EndToEnd
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import SampleId, Source, new_arrays
from hpctrain.data.sources.reader import BLOCK_BYTES, Reader

DOCUMENT = "_document"
_MAX_OFFSETS = 64  # shards whose offsets are kept


class Windows(Source):
    """A source of windows of one field, (length, *shape), by default one after the other.

    They begin `stride` elements apart. With `documents` samples also have FIELD_document, int32
    (length,): the number of the document that an element belongs to, counted from 0 in each window.
    Attention masks and positions that begin anew in each document need it.
    """

    def __init__(
        self,
        reader: Reader,
        field: str,
        length: int,
        stride: int | None = None,
        *,
        documents: bool = False,
    ) -> None:
        if field not in reader.fields or not reader.fields[field].variable:
            variable = [name for name, spec in reader.fields.items() if spec.variable]
            raise DataError(
                f"{reader.folder} has no variable-length field {field!r} to cut windows from; it "
                f"has {', '.join(variable) or 'none'}"
            )
        self._stride = length if stride is None else stride
        self._reader, self._field, self._length = reader, field, length
        spec = reader.fields[field]
        self.fields: Mapping[str, Field] = {field: Field(spec.dtype, (length, *spec.shape))}
        if documents:
            self.fields = {**self.fields, field + DOCUMENT: Field("int32", (length,))}
        totals = reader.elements(field)
        self._windows = EndToEnd(np.maximum(0, (totals - length) // self._stride + 1))
        if not len(self):
            raise DataError(
                f"no shard of {reader.folder}, split {reader.split!r}, has a window of {length}: "
                f"the longest has {totals.max()} elements of {field!r}"
            )
        self._offsets = lru_cache(_MAX_OFFSETS)(partial(reader.offsets, field))

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, indices: Int64s, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the windows `indices`, in that order; see `Reader.read`."""
        shards, starts = self._locate(indices)
        found = new_arrays(self.fields, len(starts)) if out is None else dict(out)
        self._reader.spans(self._field, shards, starts, self._length, found[self._field])
        if self._field + DOCUMENT in found:
            self._number(shards, starts, found[self._field + DOCUMENT])
        return found

    def block_size(self) -> int:
        """Return how many windows make about BLOCK_BYTES."""
        return max(1, BLOCK_BYTES // self.fields[self._field].nbytes)

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """See `Source`."""
        dataset, _ = self._reader.fields[self._field].datasets(self._field)
        shards, starts = self._locate(indices)
        return [
            SampleId(f"{self._reader.shard_name(shard)}:{dataset}", start)
            for shard, start in zip(shards.tolist(), starts.tolist(), strict=True)
        ]

    def prepare(self, indices: Int64s) -> None:
        """See `Source`."""
        self._reader.prepare_shards(self._windows.pieces(indices))

    def _locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return the shard of each window, and its first element there: int64 (n,) each."""
        shards, windows = self._windows.locate(indices, "windows")
        return shards, windows * self._stride

    def _number(self, shards: Int64s, starts: Int64s, out: Array) -> None:
        """Number the documents of each window, into `out`: 1 where one begins, then the sums."""
        out[:] = 0
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            offsets = self._offsets(shard)
            first = np.searchsorted(offsets, starts[rows], side="right")
            last = np.searchsorted(offsets, starts[rows] + self._length, side="left")
            counts = last - first
            before = np.repeat(np.cumsum(counts) - counts, counts)
            begins = offsets[np.repeat(first, counts) + np.arange(counts.sum()) - before]
            where = np.repeat(rows, counts)
            out[where, begins - starts[where]] = 1  # documents without elements do not count
        np.cumsum(out, axis=1, out=out)
