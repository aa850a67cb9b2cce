"""One shard file: how `hpctrain.data.format` lays it out, and its digest.

HDF5 writes the frame and makes room for the datasets; the data then goes straight to their
offsets. That is as fast as the disk, and a disk that gets full is an ordinary OSError.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from hpctrain.data.index import Field
from hpctrain.data.ragged import Array

FORMAT = "hpctrain-shard"
VERSION = 1
ALIGNMENT = 4096  # bytes: a page


def shard_name(split: str, number: int) -> str:
    """Return SPLIT-00000.h5."""
    return f"{split}-{number:05d}.h5"


def write_shard(
    path: Path, split: str, fields: Mapping[str, Field], chunks: Mapping[str, Sequence[Any]]
) -> None:
    """Write one file.

    Args:
        path: Replaced if it exists.
        split: Name of its split.
        fields: The schema.
        chunks: For each field the samples in pieces, at least one, of the schema's dtype and
            shape; a variable-length field's are `Ragged`.

    Raises:
        OSError: It cannot be written.
    """
    datasets: dict[str, Sequence[Array]] = {}
    for name, field in fields.items():
        if field.variable:
            lengths = np.concatenate([chunk.lengths for chunk in chunks[name]])
            datasets[f"{name}/values"] = [chunk.values for chunk in chunks[name]]
            datasets[f"{name}/offsets"] = [np.append(0, np.cumsum(lengths))]
        else:
            datasets[name] = chunks[name]
    count = sum(map(len, next(iter(chunks.values()))))
    try:
        offsets = _write_frame(path, split, count, datasets)
    except RuntimeError as error:  # what h5py makes of a full disk when it closes the file
        raise OSError(str(error)) from None
    with open(path, "r+b") as file:
        for name, arrays in datasets.items():
            file.seek(offsets[name])
            for array in arrays:
                file.write(np.ascontiguousarray(array, _little(array)).data)


def _write_frame(
    path: Path, split: str, count: int, datasets: Mapping[str, Sequence[Array]]
) -> dict[str, int]:
    """Write everything but the data; return each dataset's offset in the file."""
    offsets = {}
    layout = {"libver": "earliest", "alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(path, "w", locking=False, **layout) as file:
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["version"] = np.int64(VERSION)
        file.attrs["split"] = np.bytes_(split)
        file.attrs["count"] = np.int64(count)
        room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        room.set_obj_track_times(False)
        for name, arrays in datasets.items():
            shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
            dataset = file.create_dataset(name, shape, _little(arrays[0]), dcpl=room)
            offsets[name] = dataset.id.get_offset() or 0  # None where there is no data
    return offsets


def _little(array: Array) -> np.dtype[Any]:
    return array.dtype.newbyteorder("<")


def digest_file(path: Path, *, sync: bool = False) -> str:
    """Return "xxh3_128:…" of a file's bytes; with `sync`, force them to the disk first."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(4 * 2**20):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"
