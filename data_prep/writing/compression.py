"""Compressed shards: their codecs, which are filters of HDF5, and their writing.

    codec    filter id
    none                 contiguous, by `write_shard`: the loader maps it
    gzip     1           every HDF5 library reads it; small, and slow
    lz4      32004       the fastest to read, and the largest
    zstd     32015       small, and fast to read

A chunk holds whole samples, at least one, and about `chunk_bytes`. It is read and decoded as a
whole, so samples of one chunk should be read together: see `hpctrain.data.samplers.block_order`.

Numbers of more than one byte go through the shuffle filter first (all first bytes, then all second
bytes, …), which nearly always saves space. All codecs but gzip need hdf5plugin, for writing and for
other readers: `import hdf5plugin` in Python, HDF5_PLUGIN_PATH for h5dump and MATLAB.

The same samples give the same bytes, if the version of the codec is the same. HDF5 makes the file
in memory, so that ordinary writes bring it to the disk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards import shard
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.storage.chunks import plugins
from hpctrain.data.shards.types import Array

CODECS = {"none": None, "gzip": 4, "lz4": None, "zstd": 3}
"""The codecs, and the level of those that have one."""
_PLUGINS = ("lz4", "zstd")
_CHUNK_BYTES = 2**20
_IMAGE_STEP = 2**24  # bytes by which a file in memory grows
_MOST_BYTES = 2**31 - 2**20  # in a chunk: the limit of LZ4 is slightly higher


@dataclass(frozen=True)
class Compression:
    """One of the CODECS, and the bytes of a chunk, about, as in the module."""

    codec: str = "none"
    chunk_bytes: int = _CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.codec in _PLUGINS:
            _library(self.codec)

    def as_json(self) -> dict[str, Any]:
        """Return what the provenance has of it."""
        return {"codec": self.codec, "level": CODECS[self.codec], "chunk_bytes": self.chunk_bytes}

    def check(self, fields: Mapping[str, Field]) -> None:
        """Check that a sample (an element, if the length varies) of a field fits into a chunk."""
        for name, field in fields.items():
            if self.codec != "none" and field.nbytes > _MOST_BYTES:
                raise DataError(
                    f"field {name!r} has samples of {field.nbytes / 1e9:.1f} GB; a compressed "
                    f"chunk holds at most {_MOST_BYTES / 1e9:.1f} GB. --codec none stores them "
                    "as they are"
                )

    def rows(self, row_bytes: int) -> int:
        """Return how many samples of `row_bytes` bytes make a chunk."""
        return max(1, min(self.chunk_bytes, _MOST_BYTES) // row_bytes)

    def filters(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return the keyword arguments of h5py's `create_dataset`; the codec is not "none"."""
        shuffle = dtype.itemsize > 1
        if self.codec == "gzip":
            return {"compression": "gzip", "compression_opts": CODECS["gzip"], "shuffle": shuffle}
        library = _library(self.codec)
        if self.codec == "lz4":
            return {"shuffle": shuffle, **library.LZ4()}
        return {"shuffle": shuffle, **library.Zstd(clevel=CODECS["zstd"])}


def write_compressed(
    path: Path,
    split: str,
    fields: Mapping[str, Field],
    parts: Mapping[str, Sequence[Any]],
    compression: Compression,
) -> tuple[int, str]:
    """Do what `write_shard` does, with a codec; it takes memory of twice the size of the file.

    The caller forces the file to the disk.
    """
    count, datasets = shard.datasets_of(fields, parts)
    with open(path, "wb", buffering=0) as file:
        output = shard.Output(file.fileno())
        output.write(_image(split, count, datasets, compression))
        return output.finish()


def _image(
    split: str, count: int, datasets: Mapping[str, Sequence[Array]], compression: Compression
) -> memoryview:
    """Return a file of compressed datasets, made in memory."""
    memory = {"driver": "core", "backing_store": False, "block_size": _IMAGE_STEP}
    # Each chunk is written as a whole, so no cache of chunks is needed.
    with h5py.File("shard", "w", rdcc_nbytes=0, **memory, **shard.layout(len(datasets))) as file:
        shard.write_attributes(file, split, count)
        for name, arrays in datasets.items():
            shape, dtype = shard.shape_of(arrays), shard.little(arrays[0])
            if name.endswith("/offsets") or not shape[0]:
                dataset = file.create_dataset(name, shape, dtype, dcpl=shard.properties())
                dataset[...] = np.concatenate(arrays)
                continue
            rows = min(compression.rows(math.prod(shape[1:]) * dtype.itemsize), shape[0])
            dataset = file.create_dataset(
                name,
                shape,
                dtype,
                chunks=(rows, *shape[1:]),
                dcpl=shard.properties(),
                **compression.filters(dtype),
            )
            values = np.concatenate(arrays)
            for start in range(0, shape[0], rows):
                dataset[start : start + rows] = values[start : start + rows]
        file.flush()
        return memoryview(file.id.get_file_image())


def _library(codec: str) -> Any:
    try:
        return plugins()
    except ImportError:
        raise ConfigError(
            f"codec {codec} needs hdf5plugin, which is not installed: "
            "pip install 'hpctrain[codecs]' (gzip and none do without)"
        ) from None
