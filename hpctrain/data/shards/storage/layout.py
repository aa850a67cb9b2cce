"""Open and check the file of one shard, and find where its datasets lie.

A dataset that is contiguous, uncompressed and in the machine's byte order (as `data_prep` writes
it) has a byte offset in the file, so its rows can be mapped, or read by `Plain`. Any other layout
is read by `Chunked`.

HDF5 follows external links, virtual datasets and external storage to any file that the user may
read: `/etc/passwd` as external storage gives samples of bytes. The digest of a shard covers none of
that, so a shard from somebody else could be used to read the files of the person who trains on it.
So no dataset is taken whose values lie in another file.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard, check_shard
from hpctrain.data.shards.storage.file import Stamp
from hpctrain.data.shards.types import SHARD_FORMAT, SHARD_VERSION

if TYPE_CHECKING:  # what most shards do not need is imported where it is made
    from hpctrain.data.shards.storage.chunks import Chunked
    from hpctrain.data.shards.storage.file import File
    from hpctrain.data.shards.storage.plain import Plain

_MOST_LINKS = 64  # followed one after the other; more are taken for a circle
_INTEGERS = (*("int8", "int16", "int32", "int64"), *("uint8", "uint16", "uint32", "uint64"))


class ShardLayout:
    """The datasets of a shard, named FIELD, or FIELD/offsets and FIELD/values.

    `offsets` has the byte offset of each that can be mapped, `rows` the readers of the others, and
    `totals` their elements. `stamp` is that of the file from before it was opened.
    """

    def __init__(
        self, path: Path, shard: Shard, fields: Mapping[str, Field], *, mapped: bool = True
    ) -> None:
        self.path, self.size, self._mapped = path, shard.bytes, mapped
        self.offsets: dict[str, int] = {}
        self.rows: dict[str, Chunked | Plain] = {}
        self.totals: dict[str, int] = {}
        self._bytes: File | None = None
        self._needs_hdf5 = False
        check_shard(path, shard)
        try:
            self.stamp = Stamp.of(os.stat(path))
            self._file = _open(path)
            self._check_version()
            for name, field in fields.items():
                if field.variable:
                    self._add_ragged(name, field, shard.count)
                else:
                    place, _ = field.datasets(name)
                    self._add(name, place, (field.dtype,), (shard.count, *field.shape), field.axis)
            if not self._needs_hdf5:
                self._file.close()
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"shard {path} is damaged: {error}") from None

    def check_is(self, stamp: Stamp) -> None:
        """Check that this is the file of a stamp."""
        if self.stamp.file != stamp.file:
            raise DataError(f"shard {self.path} was replaced while it was being opened")

    def _check_version(self) -> None:
        """Check the version of a shard in our format. Other HDF5 files have no such attribute."""
        if self._file.attrs.get("format") == SHARD_FORMAT.encode():
            found = self._file.attrs.get("version")
            if found != SHARD_VERSION:
                raise DataError(
                    f"shard {self.path}: found version {found}, this hpctrain reads {SHARD_VERSION}"
                )

    def _add_ragged(self, name: str, field: Field, count: int) -> None:
        offsets, values = f"{name}/offsets", f"{name}/values"
        values_place, offsets_place = field.datasets(name)
        # Other programs use any integer type. Ours are int64, which can be mapped.
        ends = self._add(offsets, offsets_place, ("int64", *_INTEGERS), (count + 1,))
        self._add(values, values_place, (field.dtype,), (None, *field.shape))
        total = self.totals[values]
        first, last = int(ends[0]), int(ends[count])
        if (first, last) != (0, total):
            raise DataError(
                f"shard {self.path}: field {name!r} has {total} values, its offsets go from "
                f"{first} to {last}"
            )

    def _add(
        self,
        name: str,
        place: str,
        dtypes: tuple[str, ...],
        shape: tuple[int | None, ...],
        axis: int = 0,
    ) -> h5py.Dataset:
        """Add a dataset of one of these dtypes. `shape` begins with the number of samples."""
        try:
            dataset = find(self._file, place)
        except Elsewhere as error:
            raise DataError(
                f"shard {self.path}: {place!r} {error}; the samples must lie in the shard, whose "
                "digest the index has"
            ) from None
        if dataset is None:
            raise DataError(f"shard {self.path} has no dataset {place!r}; the index lists it")
        want = shape[1 : axis + 1] + shape[:1] + shape[axis + 1 :]
        if (differs := _disagreement(dataset, dtypes, want)) is not None:
            raise DataError(
                f"shard {self.path}: {place!r} is {differs[0]}, the index says {differs[1]}"
            )
        self.totals[name] = dataset.shape[axis]
        offset = dataset.id.get_offset()  # None: chunked, compact, or without data
        plain = offset is not None and not axis and dtype_of(dataset) == dtypes[0]
        if plain:  # whether the stored bytes are those of a numpy array of this dtype
            stored, made = dataset.id.get_type(), h5py.h5t.py_create(dataset.dtype)
            plain = dataset.dtype.isnative and stored.equal(made)
        if dataset.size == 0:
            self.offsets[name] = 0
        elif plain:
            if offset + dataset.nbytes > self.size:
                raise DataError(f"shard {self.path} is truncated: {place!r} goes beyond its end")
            self.offsets[name] = offset
        if name not in self.offsets or not self._mapped:
            self._add_rows(name, dataset, axis)
        return dataset

    def _add_rows(self, name: str, dataset: h5py.Dataset, axis: int) -> None:
        """Add the reader of a dataset that cannot be mapped."""
        from hpctrain.data.shards.storage.chunks import Chunked, decoders
        from hpctrain.data.shards.storage.file import File
        from hpctrain.data.shards.storage.plain import Plain

        if dataset.size == 0:
            return
        self._bytes = self._bytes or File(self.path)
        offset = self.offsets.pop(name, None)
        if offset is not None:
            self.rows[name] = Plain(self._bytes, name, offset, dtype_of(dataset), dataset.shape[1:])
            return
        chunked = Chunked(dataset, self._bytes, pool=decoders(os.getpid()), axis=axis)
        self.rows[name] = chunked
        self._needs_hdf5 |= not chunked.direct


def _open(path: Path) -> h5py.File:
    """Open without locks: there may be thousands of readers, on file systems without locks."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "file locking flag" not in str(error):
            raise
        return h5py.File(path, "r")  # with the lock setting of whoever has it open in this process


def _disagreement(
    dataset: h5py.Dataset, dtypes: Sequence[str], shape: Sequence[int | None]
) -> tuple[str, str] | None:
    """Return what a dataset is and what the index lists, such as `float32 [3]`; None: they agree.

    It may have any of the dtypes; None in the shape stands for any size.
    """
    dtype, found = dtype_of(dataset), list(dataset.shape or ())  # None: there is no data at all
    same = len(found) == len(shape) and all(
        size in (None, have) for size, have in zip(shape, found, strict=True)
    )
    if same and dtype in dtypes:
        return None
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{dtype} {found}", f"{dtypes[0]} [{sizes}]"


def dtype_of(dataset: h5py.Dataset) -> str:
    """Return the dtype that a dataset is read as, in native byte order. A bool is read as uint8."""
    dtype: np.dtype[np.generic] = dataset.dtype
    return "uint8" if dtype.kind == "b" else dtype.newbyteorder("=").name


class Elsewhere(Exception):
    """The values of a dataset lie in another file; the message says how, after the name."""


class Circle(Exception):
    """Too many links follow each other."""


def find(file: h5py.File, place: str) -> h5py.Dataset | None:
    """Return the dataset at a path in an open file, or None if no dataset is there.

    Soft links are followed inside the file. No other file is opened. A link that leads to another
    file, and values that lie in another file, raise Elsewhere.
    """
    try:
        here = walk(file["/"], place)
    except Circle:
        return None
    return check_here(here) if isinstance(here, h5py.Dataset) else None


def check_here(dataset: h5py.Dataset) -> h5py.Dataset:
    """Check that the values of a dataset lie in its own file: otherwise this is Elsewhere."""
    if dataset.is_virtual:
        others = sorted({source.file_name for source in dataset.virtual_sources()})
        raise Elsewhere(f"is a virtual dataset, of {', '.join(others[:3])}")
    if dataset.external:
        raise Elsewhere(f"is stored in the file {dataset.external[0][0]}")
    return dataset


def walk(root: h5py.Group, place: str) -> Any:
    """Return the object at a path below a group, or None if there is none; see `find`.

    Links are followed one by one: too many are a Circle.
    """
    here: Any = root
    names, followed = _names(place), 0
    while names:
        name = names.pop(0).encode()
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
            return None
        kind = here.id.links.get_info(name).type
        if kind == h5py.h5l.TYPE_HARD:
            here = here[name]
            continue
        if kind not in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
            raise Elsewhere(f"is a link of the type {kind}, which may lead to another file")
        followed += 1
        if followed > _MOST_LINKS:
            raise Circle
        target = here.id.links.get_val(name)
        if kind == h5py.h5l.TYPE_EXTERNAL:
            raise Elsewhere(f"is a link into {os.fsdecode(target[0])}")
        names = _names(target.decode()) + names
        here = here.file["/"] if target.startswith(b"/") else here
    return here


def _names(place: str) -> list[str]:
    return [name for name in place.split("/") if name not in ("", ".")]
