"""One shard file: how `hpctrain.data.format` lays it out, and its digest."""

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
    count = sum(map(len, next(iter(chunks.values()))))
    with h5py.File(
        path, "w", libver="earliest", alignment_threshold=1, alignment_interval=ALIGNMENT
    ) as file:
        attributes = {
            "format": np.bytes_(FORMAT),
            "version": np.int64(VERSION),
            "split": np.bytes_(split),
            "count": np.int64(count),
        }
        for key, value in attributes.items():
            file.attrs[key] = value
        for name, field in fields.items():
            if field.variable:
                group = file.create_group(name)
                lengths = np.concatenate([piece.lengths for piece in chunks[name]])
                _write(group, "values", field.dtype, [piece.values for piece in chunks[name]])
                _write(group, "offsets", "int64", [np.append(0, np.cumsum(lengths))])
            else:
                _write(file, name, field.dtype, chunks[name])


def _write(group: Any, name: str, dtype: str, chunks: Sequence[Array]) -> None:
    shape = (sum(map(len, chunks)), *chunks[0].shape[1:])
    little = np.dtype(dtype).newbyteorder("<")
    dataset = group.create_dataset(name, shape, little, track_times=False)
    start = 0
    for chunk in chunks:
        dataset[start : start + len(chunk)] = chunk
        start += len(chunk)


def digest_file(path: Path, *, sync: bool = False) -> str:
    """Return "xxh3_128:…" of a file's bytes; with `sync`, force them to the disk first."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(4 * 2**20):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"
