"""The samples of one split, read by index; shards are opened when they are first needed.

A contiguous, uncompressed dataset (`data_prep` writes these) begins at a byte offset of its file.
The shard is memory-mapped, and the samples of a batch, from any shards, are read by one gather,
without HDF5. `hpctrain.data.shards.storage.layout` reads other layouts. What is read comes from
unchanged files: see `hpctrain.data.sources.opened`.

    >>> reader = Reader(Path("data/digits"), "train")
    >>> reader.read(np.array([5, 0, 5]))["image"].shape
    (3, 1, 8, 8)

Threads may share a reader.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.base.forks import PerProcess
from hpctrain.data.places.placement import ShardPlace, load_index, open_place
from hpctrain.data.samplers.order import EndToEnd
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index, Shard, is_url
from hpctrain.data.shards.ragged import Ragged, offsets_of
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import SampleId, Source, new_arrays
from hpctrain.data.sources.datasets import Datasets
from hpctrain.data.sources.opened import OpenShards

T = TypeVar("T")

BLOCK_BYTES = 2**20  # stripes of parallel file systems have 1 to 4 MB


class Reader(PerProcess, Source):
    """The samples of one split, 0 to len(reader) - 1.

    `folder` may be a URL. `place` says where the shards' files are, if not there, and `index` is
    that of the data set, if it has been read. Contiguous datasets are mapped; on network file
    systems, and without `mapped`, they are read. With `first_use` a shard is compared with its
    digest when it is first opened.
    """

    OWN = ("opened",)

    def __init__(
        self,
        folder: Path | str,
        split: str,
        fields: Iterable[str] | None = None,
        *,
        place: ShardPlace | None = None,
        index: Index | None = None,
        mapped: bool = True,
        first_use: bool = False,
    ) -> None:
        self.folder = folder if is_url(folder) else Path(folder)
        self.split, self.index = split, index or load_index(folder)
        self.fields: Mapping[str, Field] = self.index.fields
        if fields is not None:
            self.fields = self._select(fields)
        chosen = self.index.split(split)
        self.shards: tuple[Shard, ...] = chosen.shards
        self._place = place or open_place(folder, "none", self.shards)
        self._mapped, self._first_use = mapped, first_use
        self._samples = EndToEnd([shard.count for shard in chosen.shards])
        self._announced: set[tuple[int, int]] = set()
        self._since_ns = time.time_ns()
        super().__init__()

    def _begin(self) -> None:
        # The shards that this process has open; none before the first read.
        self.opened = OpenShards(
            *(self.shards, self._place, self.fields),
            *(self._mapped, self._since_ns, self._first_use),
        )

    def __len__(self) -> int:
        return len(self._samples)

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> dict[str, Array | Ragged]:
        """Return the samples `indices`, in that order; see `hpctrain.data.source.Source`."""
        shards, rows = self.locate(indices)
        found = new_arrays(self.fields, len(rows)) if out is None else out

        def read(part: slice, datasets: Datasets) -> dict[str, Ragged]:
            for name, array in found.items():
                datasets.spans(name, shards[part], rows[part], 1, array[part])
            return {
                name: self._read_ragged(datasets, name, shards[part], rows[part])
                for name, field in self.fields.items()
                if field.variable
            }

        ragged = self._in_parts(shards, read)
        return {
            name: found[name] if name in found else Ragged.joined([part[name] for part in ragged])
            for name in self.fields
        }

    def lengths(self, name: str, indices: Int64s) -> Int64s:
        """Return the lengths of samples of a variable-length field, int64 (n,); see `read`."""
        shards, rows = self.locate(indices)

        def read(part: slice, datasets: Datasets) -> Int64s:
            starts, stops = _places(datasets, name, shards[part], rows[part])
            return stops - starts

        return np.concatenate(self._in_parts(shards, read))

    def spans(self, name: str, shards: Int64s, starts: Int64s, length: int, out: Array) -> None:
        """Read spans of a variable-length field's values into `out`, (n, length, *shape).

        They go over the ends of samples, too, but not of shards: `shards` are places in
        `self.shards`.
        """

        def read(part: slice, datasets: Datasets) -> None:
            place = shards[part], starts[part]
            datasets.spans(f"{name}/values", *place, length, out[part])

        self._in_parts(shards, read)

    def elements(self, name: str) -> Int64s:
        """Return how many elements of a variable-length field each shard has, int64 (shards,)."""
        found = [shard.elements.get(name, -1) for shard in self.shards]
        for i, known in enumerate(found):
            if known < 0:
                with self.opened.held(np.array([i])) as datasets:
                    found[i] = datasets.layouts[i].totals[f"{name}/values"]
        return np.array(found, np.int64)

    def offsets(self, name: str, shard: int) -> Int64s:
        """Return the offsets of a variable-length field in a shard, int64 (count + 1,)."""
        count = self.shards[shard].count + 1
        found: Int64s = np.empty(count, np.int64)
        whole = (np.array([shard]), np.array([0]), count, found[None])
        self.opened.read(whole[0], lambda datasets: datasets.spans(f"{name}/offsets", *whole))
        return found

    def only(self, fields: Iterable[str]) -> Self:
        """Return a reader of the same samples that reads these fields alone."""
        options: Any = {"place": self._place, "index": self.index, "mapped": self._mapped}
        return type(self)(self.folder, self.split, fields, **options, first_use=self._first_use)

    def block_size(self) -> int:
        """Return how many samples make a block of whole chunks, of about BLOCK_BYTES."""
        with self.opened.held(np.zeros(1, np.int64)) as datasets:
            chunk = datasets.chunk_rows(0)
        size = max(1, self.shards[0].bytes // self.shards[0].count)
        return chunk * max(1, BLOCK_BYTES // (size * chunk))

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """See `Source`."""
        shards, rows = self.locate(indices)
        return [
            SampleId(self.shard_name(shard), row)
            for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)
        ]

    def shard_name(self, shard: int) -> str:
        """Return the path or URL of a shard (its place in `self.shards`) in the data set."""
        return f"{str(self.folder).rstrip('/')}/{self.shards[shard].path}"

    def prepare(self, indices: Int64s) -> None:
        """See `Source`."""
        self.prepare_shards(self.locate(indices)[0])

    def read_ahead(self, blocks: Int64s) -> None:
        """See `Source`."""
        ranges = [(start, stop) for start, stop in blocks.tolist()]
        for start, stop in ranges:
            if (start, stop) not in self._announced:
                self._will_need(start, stop)
        self._announced = set(ranges)

    def prepare_shards(self, shards: Int64s) -> None:
        """Prepare for reading these shards (places in `self.shards`) soon, in this order."""
        self._place.plan([self.shards[i] for i in dict.fromkeys(shards.tolist())])

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return the shard of each index, and its row there: int64 (n,) each."""
        return self._samples.locate(indices)

    def _will_need(self, start: int, stop: int) -> None:
        """Let the system read the samples `start` to `stop` ahead."""
        first, last = self._samples.pieces(np.array([start, stop - 1])).tolist()
        for shard in range(first, last + 1):
            begin, end = int(self._samples.firsts[shard]), int(self._samples.ends[shard])
            low, high = max(start, begin) - begin, min(stop, end) - begin
            with self.opened.held(np.array([shard])) as datasets:
                for name, field in self.fields.items():
                    if not field.variable:
                        datasets.will_need(name, shard, low, high)

    def _in_parts(self, shards: Int64s, read: Callable[[slice, Datasets], T]) -> list[T]:
        """Return what `read` returns for parts of `shards`, as many as may be open at once."""
        opened, size = self.opened, self.opened.at_once
        parts = [slice(first, first + size) for first in range(0, max(1, len(shards)), size)]
        return [opened.read(shards[part], partial(read, part)) for part in parts]

    def _select(self, names: Iterable[str]) -> dict[str, Field]:
        known, found = self.index.fields, {}
        for name in names:
            if name not in known:
                there = ", ".join(f"{other} {field}" for other, field in known.items())
                raise DataError(f"{self.folder} has no field {name!r}; it has {there}")
            found[name] = known[name]
        return found

    def _read_ragged(self, datasets: Datasets, name: str, shards: Int64s, rows: Int64s) -> Ragged:
        starts, stops = _places(datasets, name, shards, rows)
        offsets = offsets_of(stops - starts)
        field = self.fields[name]
        values = np.empty((int(offsets[-1]), *field.shape), field.dtype)
        datasets.runs(f"{name}/values", shards, starts, offsets[1:], values)
        return Ragged(values, offsets)


def _places(datasets: Datasets, name: str, shards: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """Return where samples of a variable-length field begin and end in their shards' values."""
    pairs = np.empty((len(rows), 2), np.int64)
    datasets.spans(f"{name}/offsets", shards, rows, 2, pairs)
    starts, stops = pairs[:, 0], pairs[:, 1]
    totals = datasets.totals(f"{name}/values", shards)
    wrong = (starts < 0) | (starts > stops) | (stops > totals)
    if wrong.any():
        path = datasets.layouts[int(shards[wrong][0])].path
        raise DataError(f"shard {path} is damaged: the offsets of {name!r} go back")
    return starts, stops
