"""One shard's file, opened and checked: where its datasets lie.

A contiguous, uncompressed dataset in the machine's byte order (what `data_prep` writes) has an
offset in the file, so its rows may be mapped, or read by `Plain`. Any other layout is read by
`Chunked`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import h5py

from hpctrain.data import shard as shard_format
from hpctrain.data.index import Field, Shard, check_shard
from hpctrain.data.storage.arena import Arena
from hpctrain.data.storage.chunks import Chunked, decoders
from hpctrain.data.storage.plain import Plain
from hpctrain.errors import DataError


class Layout:
    """A shard's datasets: FIELD, or FIELD/offsets and FIELD/values.

    Args:
        path: The file.
        shard: What the index lists.
        fields: Those that are read.
        mapped: Whether what can be mapped shall be.

    Attributes:
        path: The file.
        size: Its bytes.
        offsets: Of the datasets that may be mapped, in the file, in bytes.
        rows: The others.
        totals: Elements of each dataset.

    Raises:
        DataError: The file is missing, damaged or not what the index says.
    """

    def __init__(
        self, path: Path, shard: Shard, fields: Mapping[str, Field], *, mapped: bool = True
    ) -> None:
        self.path, self.size, self._mapped = path, shard.bytes, mapped
        self.offsets: dict[str, int] = {}
        self.rows: dict[str, Chunked | Plain] = {}
        self.totals: dict[str, int] = {}
        self._needs_hdf5 = False
        check_shard(path, shard)
        try:
            # No lock: thousands of readers, often on file systems that have none.
            self._file = h5py.File(path, "r", locking=False)
            self._check_version()
            for name, field in fields.items():
                if field.variable:
                    self._add_ragged(name, field, shard.count)
                else:
                    self._add(name, field.dtype, (shard.count, *field.shape))
            if not self._needs_hdf5:
                self._file.close()
            stat = os.stat(path)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"shard {path} is damaged: {error}") from None
        self._stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns

    def map(self, arena: Arena, slot: int) -> None:
        """Map the file into a slot.

        Raises:
            DataError: It has been replaced since it was opened, or cannot be mapped.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                stat = os.fstat(descriptor)
                arena.map(slot, descriptor, self.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"shard {self.path} cannot be mapped: {error.strerror}") from None
        if (stat.st_ino, stat.st_size, stat.st_mtime_ns) != self._stamp:
            raise DataError(f"shard {self.path} was replaced while it was being opened")

    def check_unchanged(self) -> None:
        """See that nobody has written into the file since it was opened.

        Raises:
            DataError: Somebody has. A file that was replaced or removed is another one: what is
                open stays as it was.
        """
        try:
            stat = os.stat(self.path)
        except OSError:
            return
        if stat.st_ino == self._stamp[0] and (stat.st_size, stat.st_mtime_ns) != self._stamp[1:]:
            raise DataError(
                f"shard {self.path} was changed while it was being read: what has been trained on "
                "since is not what the index says. Shards may be replaced, never edited"
            )

    def _check_version(self) -> None:
        """A shard of ours says so; HDF5 files of others have no such attribute."""
        if self._file.attrs.get("format") == shard_format.FORMAT.encode():
            found = self._file.attrs.get("version")
            if found != shard_format.VERSION:
                raise DataError(
                    f"shard {self.path}: found version {found}, this hpctrain reads "
                    f"{shard_format.VERSION}"
                )

    def _add_ragged(self, name: str, field: Field, count: int) -> None:
        offsets, values = f"{name}/offsets", f"{name}/values"
        ends = self._add(offsets, "int64", (count + 1,))
        self._add(values, field.dtype, (None, *field.shape))
        total = self.totals[values]
        first, last = int(ends[0]), int(ends[count])
        if (first, last) != (0, total):
            raise DataError(
                f"shard {self.path}: field {name!r} has {total} values, its offsets go from "
                f"{first} to {last}"
            )

    def _add(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> h5py.Dataset:
        dataset = self._file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise DataError(f"shard {self.path} has no dataset {name!r}; the index lists it")
        if dataset.file.filename != self._file.filename:  # its offset is one in that file
            raise DataError(
                f"shard {self.path}: {name!r} is a link into {dataset.file.filename}; the samples "
                "must lie in the shard, whose digest the index has"
            )
        found: tuple[int, ...] = dataset.shape or ()  # None: there is no data at all
        agrees = len(found) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, found, strict=True)
        )
        if dataset.dtype.newbyteorder("=") != dtype or not agrees:
            want = [size if size is not None else "any" for size in shape]
            raise DataError(
                f"shard {self.path}: {name!r} is {dataset.dtype.name} {list(found)}, the index "
                f"says {dtype} {want}"
            )
        self.totals[name] = found[0]
        offset = dataset.id.get_offset()  # None: chunked, compact, or without data
        if dataset.size == 0:
            self.offsets[name] = 0
        elif offset is not None and _as_in_memory(dataset) and not dataset.external:
            if offset + dataset.nbytes > self.size:
                raise DataError(f"shard {self.path} is truncated: {name!r} goes beyond its end")
            if self._mapped:
                self.offsets[name] = offset
            else:
                self.rows[name] = Plain(self.path, name, offset, dtype, dataset.shape[1:])
        else:
            self.rows[name] = chunked = Chunked(dataset, self.path, pool=decoders())
            self._needs_hdf5 |= not chunked.direct
        return dataset


def _as_in_memory(dataset: h5py.Dataset) -> bool:
    """Whether the bytes in the file are those of an array: the order of bytes, and no odd bits."""
    dtype = dataset.dtype
    return dtype.isnative and bool(dataset.id.get_type().equal(h5py.h5t.py_create(dtype)))
