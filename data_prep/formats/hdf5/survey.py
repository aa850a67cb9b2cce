"""Read one HDF5 file of another program completely, in the way a loader will read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.dataset import moments_of
from data_prep.formats.hdf5.hdf5_storage import Written
from data_prep.processes import Progress
from data_prep.source import SourceFile, readable
from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.shards.storage.chunks import Chunked
from hpctrain.data.shards.storage.layout import ShardLayout


@dataclass(frozen=True)
class _Found:
    """The result of reading a file."""

    shard: Shard  # the file's entry in the index
    moments: Mapping[str, Mapping[str, Any]]  # the state of the `Moments` of each field


@dataclass(frozen=True)
class Survey:
    """The task of a worker process: read one file."""

    folder: Path  # the folder of the index
    paths: Sequence[str]  # paths of the files in the folder
    sources: Sequence[SourceFile]  # sizes and times of the files when they were first opened
    counts: Sequence[int]  # number of samples of each file
    splits: Sequence[str]  # split of each file
    schema: Mapping[str, Field]  # the fields, the same in all files

    def look(self, number: int, progress: Progress) -> _Found:
        """Compute the digest of the file, and check that all of it can be read."""
        source, path = self.sources[number], self.folder / self.paths[number]
        source.check()
        with readable(path):
            digest = digest_file(path, progress)
        shard = Shard(
            *(self.paths[number], self.splits[number], self.counts[number], source.size, digest)
        )
        layout = ShardLayout(path, shard, self.schema, mapped=False)  # a loader uses the same class
        _check_storage(layout, self.schema)
        try:
            moments = moments_of(self.folder, self.schema, shard)
        except MemoryError:
            raise DataError(f"{path}: a sample does not fit into memory") from None
        source.check()
        progress(shard.count, 0)
        elements = {n: moments[n].total for n, field in self.schema.items() if field.variable}
        states = {name: found.state() for name, found in moments.items()}
        return _Found(replace(shard, elements=elements), states)


def _check_storage(layout: ShardLayout, fields: Mapping[str, Field]) -> None:
    """Check that HDF5 finds the chunks that a loader finds, and decodes both ends alike."""
    with h5py.File(layout.path, "r", locking=False) as file:
        for name, field in fields.items():
            parts = ("/values", "/offsets") if field.variable else ("",)
            for dataset, part in zip(field.datasets(name), parts, strict=False):
                try:
                    problem = Written(file[dataset]).problem(axis=field.axis)
                    stored = layout.rows.get(name + part)
                    if not problem and isinstance(stored, Chunked) and stored.direct:
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
