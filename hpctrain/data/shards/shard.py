"""A shard, version 1: plain HDF5 that h5ls, h5py and MATLAB read; its writing and its digest.

    /                      attributes: format "hpctrain-shard", version 1, split, count
    /image                 a fixed-size field: uint8 (count, 3, 64, 64)
    /label                 another: int64 (count,)
    /text/values           a variable-length field: uint8 (total,), the samples end to end
    /text/offsets          int64 (count + 1,): sample i is values[offsets[i]:offsets[i + 1]]

- The first axis of every dataset is the sample (of `values`: the element).
- Datasets are contiguous and not compressed, little-endian, and begin at a multiple of 4096
  bytes, so that a reader may map them; the dtypes are those of `field.DTYPES`. In a file with more
  than 1024 datasets, those smaller than 4096 bytes begin at any byte.
- Or `data_prep.writing.compression` has compressed them in chunks of whole samples, which begin at
  such multiples too; `offsets` stay contiguous.

HDF5 writes everything of an uncompressed file but the data, which ordinary writes then bring to the
byte offsets of the datasets, at the disk's speed; a full disk is an ordinary OSError, and the
digest is computed meanwhile.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import SHARD_FORMAT, SHARD_VERSION, Array

ALIGNMENT = 4096  # bytes: a page
STEP = 2**20  # bytes that are written, and then digested while the cache has them
MANY = 1024  # more datasets than these are aligned only if they are as large as a page


def shard_name(split: str, number: int) -> str:
    """Return SPLIT-00000.h5."""
    return f"{split}-{number:05d}.h5"


def write_shard(
    path: Path,
    split: str,
    fields: Mapping[str, Field],
    parts: Mapping[str, Sequence[Any]],
    *,
    sync: bool = True,
) -> tuple[int, str]:
    """Write one file, and force it to the disk; return its size in bytes and digest "xxh3_128:…".

    A field has its samples in one or more `parts`; those of a variable-length field are `Ragged`.
    Without `sync` the caller forces it to the disk.
    """
    count, datasets = datasets_of(fields, parts)
    try:
        offsets = _write_frame(path, split, count, datasets)
    except (OSError, RuntimeError) as error:  # RuntimeError: the disk is full when h5py closes it
        found = re.search(r"errno = (\d+)", str(error))
        if found is None:
            raise OSError(str(error)) from None
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
    with open(path, "r+b", buffering=0) as file:
        output = Output(file.fileno(), sync)
        for name in sorted(offsets, key=lambda name: offsets[name]):
            output.keep(offsets[name])
            for array in datasets[name]:
                stored = np.ascontiguousarray(array, little(array))
                output.write(stored.reshape(-1).view(np.uint8).data)
        output.keep()
        return output.finish()


def datasets_of(
    fields: Mapping[str, Field], parts: Mapping[str, Sequence[Any]]
) -> tuple[int, dict[str, Sequence[Array]]]:
    """Return the number of samples, and the arrays of each dataset, one after the other."""
    datasets: dict[str, Sequence[Array]] = {}
    for name, field in fields.items():
        if field.variable:
            lengths = np.concatenate([part.lengths for part in parts[name]])
            datasets[f"{name}/values"] = [part.values for part in parts[name]]
            datasets[f"{name}/offsets"] = [np.append(0, np.cumsum(lengths))]
        else:
            datasets[name] = parts[name]
    return sum(map(len, next(iter(parts.values())))), datasets


class Output:
    """A file that is written from beginning to end while its digest is computed."""

    def __init__(self, descriptor: int, sync: bool = False) -> None:
        self._descriptor, self._sync = descriptor, sync
        self._digest = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: memoryview) -> None:
        """Write bytes."""
        for start in range(0, len(data), STEP):
            step = left = data[start : start + STEP]
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._digest.update(step)
        self.size += len(data)

    def keep(self, stop: int | None = None) -> None:
        """Keep what the file has up to byte `stop`, or up to its end."""
        while stop is None or self.size < stop:
            step = os.read(self._descriptor, STEP if stop is None else min(STEP, stop - self.size))
            if not step:
                if stop is not None:
                    raise OSError(f"it ends at byte {self.size}, before its data at {stop}")
                return
            self._digest.update(step)
            self.size += len(step)

    def finish(self) -> tuple[int, str]:
        """Return size and digest, after the file is on the disk if `sync`."""
        if self._sync:
            os.fsync(self._descriptor)
        return self.size, f"xxh3_128:{self._digest.hexdigest()}"


def _write_frame(
    path: Path, split: str, count: int, datasets: Mapping[str, Sequence[Array]]
) -> dict[str, int]:
    """Write everything but the data; return the byte offset of each dataset that is not empty."""
    offsets = {}
    with h5py.File(path, "w", locking=False, **layout(len(datasets))) as file:
        write_attributes(file, split, count)
        for name, arrays in datasets.items():
            room = properties()
            room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            dataset = file.create_dataset(name, shape_of(arrays), little(arrays[0]), dcpl=room)
            offset = dataset.id.get_offset()
            if offset is not None:
                offsets[name] = offset
    return offsets


def layout(datasets: int) -> dict[str, Any]:
    """Return how HDF5 lays out a file with this number of datasets.

    With many small ones, alignment would cost pages of padding, and HDF5 would search all gaps.
    """
    threshold = 1 if datasets <= MANY else ALIGNMENT
    sizes = {"alignment_threshold": threshold, "alignment_interval": ALIGNMENT}
    return {"libver": "earliest", **sizes}


def write_attributes(file: h5py.File, split: str, count: int) -> None:
    """Write what the module says of the file itself."""
    file.attrs["format"] = np.bytes_(SHARD_FORMAT)
    file.attrs["version"] = np.int64(SHARD_VERSION)
    file.attrs["split"] = np.bytes_(split)
    file.attrs["count"] = np.int64(count)


def properties() -> h5py.h5p.PropDCID:
    """Return how a dataset is made, without the time of today."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    return properties


def shape_of(arrays: Sequence[Array]) -> tuple[int, ...]:
    """Return the shape of a dataset of these arrays."""
    return (sum(map(len, arrays)), *arrays[0].shape[1:])


def little(array: Array) -> np.dtype[Any]:
    """Return the dtype of an array as files have it."""
    return array.dtype.newbyteorder("<")


def digest_file(path: Path, advance: Callable[[int, int], None] | None = None) -> str:
    """Return "xxh3_128:…" of a file's bytes; `advance(0, bytes)` is called for each block."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(4 * 2**20):
            digest.update(block)
            if advance is not None:
                advance(0, len(block))
    return f"xxh3_128:{digest.hexdigest()}"
