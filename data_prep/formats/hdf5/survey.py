"""Read one HDF5 file of another program completely, in the way a loader will read it."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.datasets.rows import blocks
from data_prep.formats.hdf5.hdf5_storage import Written
from data_prep.processes import Progress
from data_prep.source import BLOCK_BYTES, SourceFile
from hpctrain.errors import DataError
from hpctrain.shards.field import Field
from hpctrain.shards.index import Shard
from hpctrain.shards.moments import Moments
from hpctrain.shards.shard import digest_file
from hpctrain.shards.storage.chunk_table import filters
from hpctrain.shards.storage.chunks import Chunked
from hpctrain.shards.storage.codecs import describe
from hpctrain.shards.storage.layout import Layout
from hpctrain.shards.storage.plain import Plain

# Bytes of a chunk: too many to decode for one sample, too few for a read.
LARGE, SMALL = 8 * 2**20, 16 * 2**10


@dataclass(frozen=True)
class Found:
    """The result of reading a file.

    Attributes:
        shard: The file's entry in the index.
        moments: The state of the `Moments` of each field.
        notes: For each field, how a loader reads it, and whether other storage would be faster.
    """

    shard: Shard
    moments: Mapping[str, Mapping[str, Any]]
    notes: Mapping[str, tuple[str, bool]]


@dataclass(frozen=True)
class Survey:
    """The task of a worker process: read one file.

    Attributes:
        folder: The folder of the index.
        paths: Paths of the files in the folder.
        sources: Sizes and times of the files when they were first opened.
        counts: Number of samples of each file.
        splits: Split of each file.
        schema: The fields, the same in all files.
        statistics: Whether the values are read, for the running statistics.
    """

    folder: Path
    paths: Sequence[str]
    sources: Sequence[SourceFile]
    counts: Sequence[int]
    splits: Sequence[str]
    schema: Mapping[str, Field]
    statistics: bool

    def look(self, number: int, progress: Progress) -> Found:
        """Compute the digest of the file, and check that all of it can be read.

        Raises:
            DataError: It cannot be read, or it was changed meanwhile.
        """
        source, path = self.sources[number], self.folder / self.paths[number]
        source.check()
        try:
            digest = digest_file(path, progress)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        shard = Shard(
            *(self.paths[number], self.splits[number], self.counts[number], source.size, digest)
        )
        with _quiet():
            layout = Layout(path, shard, self.schema, mapped=False)  # a loader uses the same class
        _check_storage(layout, self.schema, decode=self.statistics)
        elements, moments = {}, {}
        try:
            for name, field in self.schema.items():
                if field.variable:
                    _check_offsets(layout, name, shard.count)
                    elements[name] = layout.totals[f"{name}/values"]
                if self.statistics:
                    found = _moments(layout, name, field, shard.count, len(self.schema))
                    moments[name] = found.state()
        except MemoryError:
            raise DataError(f"{path}: a sample of {name!r} does not fit into memory") from None
        notes = _how_read(layout, self.schema)
        source.check()
        progress(shard.count, 0)
        return Found(replace(shard, elements=elements), moments, notes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the storage warnings: the notes say the same."""
    log = logging.getLogger("hpctrain.shards.storage")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _check_storage(layout: Layout, fields: Mapping[str, Field], *, decode: bool) -> None:
    """Check that HDF5 finds the chunks of a loader, and decodes the first and last alike."""
    with h5py.File(layout.path, "r", locking=False) as file:
        for name, field in fields.items():
            parts = ("/values", "/offsets") if field.variable else ("",)
            for dataset, part in zip(field.datasets(name), parts, strict=False):
                try:
                    problem = Written(file[dataset]).problem(axis=field.axis)
                    stored = layout.rows.get(name + part)
                    if not problem and decode and isinstance(stored, Chunked) and stored.direct:
                        problem = _read_otherwise(file[dataset], stored, field.axis)
                except (OSError, RuntimeError, ValueError, KeyError) as error:
                    problem = f"cannot be read by HDF5: {error}"
                if problem:
                    raise DataError(f"{layout.path}: {dataset} {problem}")


def _read_otherwise(dataset: h5py.Dataset, stored: Chunked, axis: int) -> str:
    """Return what is wrong if HDF5 reads the first or last sample otherwise than a loader."""
    for row in {0, stored.shape[0] - 1}:
        theirs = dataset[(slice(None),) * axis + (row,)]
        if stored.rows(np.array([row]))[0].tobytes() != theirs.tobytes():
            return f"is damaged: HDF5 reads other values at {row} than the ones that are stored"
    return ""


def _check_offsets(layout: Layout, name: str, count: int) -> None:
    """Check that offsets never decrease. `Layout` checks the first and the last."""
    rows, last = layout.rows[f"{name}/offsets"], 0
    for start in range(0, count + 1, BLOCK_BYTES // 8):
        ends = np.empty(min(BLOCK_BYTES // 8, count + 1 - start), np.int64)
        rows.copy(start, start + len(ends), ends)
        back = np.flatnonzero(np.diff(ends, prepend=last) < 0)
        if len(back):
            sample = start + int(back[0]) - 1
            raise DataError(f"{layout.path}: the offsets of {name!r} go back at sample {sample}")
        last = int(ends[-1])


def _moments(layout: Layout, name: str, field: Field, count: int, fields: int) -> Moments:
    moments = Moments(fields)
    for _, values in blocks(layout, {name: field}, 0, count):
        moments.add(values[name])
    return moments


def _how_read(layout: Layout, fields: Mapping[str, Field]) -> dict[str, tuple[str, bool]]:
    """See `Found.notes`."""
    found = {}
    with h5py.File(layout.path, "r", locking=False) as file:
        for name, field in fields.items():
            values, offsets = field.datasets(name)
            found[name] = _note(layout, f"{name}/values" if offsets else name, file[values], field)
            if offsets:
                ends = _note(layout, f"{name}/offsets", file[offsets], field)
                if ends[1] and not found[name][1]:
                    found[name] = f"{found[name][0]}; its offsets: {ends[0]}", True
    return found


def _note(layout: Layout, name: str, dataset: h5py.Dataset, field: Field) -> tuple[str, bool]:
    rows = layout.rows.get(name)
    if rows is None or isinstance(rows, Plain):  # None: there are no values
        return "contiguous: mapped as it lies", False
    if dataset.chunks:
        return _of_chunks(dataset, rows, field)
    why = [f"samples along axis {field.axis}"] * bool(field.axis)
    why += ["other byte order"] * (not dataset.dtype.isnative)
    text = ", ".join(why) or f"stored as {dataset.dtype.name}"
    return f"contiguous, but {text}: read by HDF5, one thread at a time", True


def _of_chunks(dataset: h5py.Dataset, rows: Chunked, field: Field) -> tuple[str, bool]:
    codec = ", ".join(describe(each) for each in filters(dataset)) or "not compressed"
    unit = "element" if field.variable else "sample"
    parts = [f"chunks of {_number(rows.chunk_rows, unit)}", codec]
    tiles = rows.chunk_bytes // max(1, math.prod(dataset.chunks) * dataset.dtype.itemsize)
    slow = []
    if tiles > 1:
        slow.append(f"each {unit} lies in {tiles} of them")
    elif rows.chunk_bytes < SMALL:
        slow.append(f"{rows.chunk_bytes} bytes are little for a read")
    if rows.chunk_rows > 1 and rows.chunk_bytes > LARGE and not field.variable:
        slow.append(f"{rows.chunk_bytes / 1e6:.0f} MB are much for a sample drawn at random")
    if not rows.direct:
        slow.append(f"decoded by HDF5, one thread at a time ({rows.reason})")
    return f"{', '.join(parts)}: {', '.join(slow) or 'decoded in threads'}", bool(slow)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
