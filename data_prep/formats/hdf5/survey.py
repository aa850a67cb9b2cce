"""Read one HDF5 file of another program completely, in the way a loader will read it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from data_prep.dataset import moments_of
from data_prep.formats.hdf5.hdf5_storage import Written
from data_prep.processes import Progress
from data_prep.source import SourceFile, readable
from data_prep.writing.moments import Moments
from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.shards.storage.chunks import Chunked
from hpctrain.data.shards.storage.layout import ShardLayout


def survey(
    folder: Path,
    fields: Mapping[str, Field],
    shards: Sequence[Shard],
    sources: Sequence[SourceFile],
    number: int,
    progress: Progress,
) -> tuple[Shard, dict[str, Moments]]:
    """Check that all of a file can be read, in a worker process.

    `shards` are the files' entries in the index of `folder`, still without the digests, and
    `sources` are the files as they were when they were first opened. Return the entry of the file,
    and the `Moments` of each field.
    """
    shard, source = shards[number], sources[number]
    source.check()
    path = folder / shard.path
    with readable(path):
        shard = replace(shard, digest=digest_file(path, progress))
    layout = ShardLayout(path, shard, fields, mapped=False)  # a loader uses the same class
    _check_storage(layout, fields)
    try:
        moments = moments_of(folder, fields, shard)
    except MemoryError:
        raise DataError(f"{path}: a sample does not fit into memory") from None
    source.check()
    progress(shard.count, 0)
    elements = {name: moments[name].total for name, field in fields.items() if field.variable}
    return replace(shard, elements=elements), moments


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
