"""Rows of one split by index, from shards that are opened when first needed.

A contiguous, uncompressed dataset (what `data_prep` writes) has an offset in its file: the shard
is mapped and a read is a gather by numpy, without HDF5 in the way. Any other layout is read by
h5py, one selection per shard.

    >>> reader = Reader(Path("data/digits"), "train")
    >>> reader.read(np.array([5, 0, 5]))["image"].shape
    (3, 1, 8, 8)

Threads may share a reader. A fork gets its own handles (h5py's must not cross it), and pickling
leaves them behind. A file that shrinks while it is mapped ends the process with SIGBUS, as with
any mapping: shards are never edited in place, only replaced.
"""

import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data import shard as shard_format
from hpctrain.data.index import Field, Index, Shard, check_shard
from hpctrain.data.ragged import Array, Ragged
from hpctrain.errors import DataError

Int64s = NDArray[np.int64]


class Reader:
    """The samples of one split, 0 to len(reader) - 1.

    Args:
        folder: Of the data set (with its index.json).
        split: Name of the split.
        fields: The fields to read, in this order; all by default.

    Attributes:
        index: The data set's index.
        fields: The schema of what is read.

    Raises:
        DataError: No data set, or no such split or field; the message has those that exist.
    """

    def __init__(self, folder: Path, split: str, fields: Iterable[str] | None = None) -> None:
        self.folder, self.split = Path(folder), split
        self.index = Index.load(self.folder)
        self.fields: Mapping[str, Field] = self._select(fields)
        chosen = self.index.split(split)
        self._count, self._shards = chosen.count, chosen.shards
        self._ends: Int64s = np.cumsum([shard.count for shard in chosen.shards], dtype=np.int64)
        self._start_cache()

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Int64s) -> dict[str, Array | Ragged]:
        """Return samples, in the order asked; repeats are allowed.

        Args:
            indices: int64 (n,), each in [0, len).

        Returns:
            Each field: an array (n, *shape) that belongs to the caller, or a `Ragged` of n
            samples when the length varies.

        Raises:
            DataError: A shard is missing, damaged or not what the index says.
            IndexError: An index is out of range.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < self._count):
            raise IndexError(f"indices {indices.min()} to {indices.max()} of {self._count} samples")
        shards = np.searchsorted(self._ends, indices, side="right")
        # Which rows of the result each shard fills: one gather per shard and field.
        order = np.argsort(shards, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if order.size else []
        visits = []
        for rows in parts:
            number = int(shards[rows[0]])
            first = int(self._ends[number]) - self._shards[number].count
            visits.append((self._open(number), rows, indices[rows] - first))
        return {
            name: (_read_ragged if field.variable else _read_fixed)(name, field, visits, len(order))
            for name, field in self.fields.items()
        }

    def _select(self, names: Iterable[str] | None) -> dict[str, Field]:
        known = self.index.fields
        chosen = list(known if names is None else names)
        for name in chosen:
            if name not in known:
                raise DataError(
                    f"{self.folder} has no field {name!r}; it has "
                    + ", ".join(f"{known_name} {field}" for known_name, field in known.items())
                )
        return {name: known[name] for name in chosen}

    # Open shards, the last used ones: a mapping costs a descriptor, of which a process has few.

    def _start_cache(self) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max(16, files // 4) if files > 0 else 4096  # -1: no limit
        self._open_shards: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()  # last: whoever sees it sees the rest

    def _open(self, number: int) -> "_OpenShard":
        if self._pid != os.getpid():  # forked: the parent's handles and lock are not ours
            self._start_cache()
        with self._lock:
            shard = self._open_shards.get(number)
            if shard is None:
                shard = _OpenShard(self.folder, self._shards[number], self.fields)
                self._open_shards[number] = shard
                while len(self._open_shards) > self._max_open:
                    self._open_shards.popitem(last=False)  # closes when its last reader is done
            self._open_shards.move_to_end(number)
            return shard

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_pid", "_lock", "_open_shards", "_max_open")
        return {key: value for key, value in self.__dict__.items() if key not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_cache()


class _OpenShard:
    """One shard's datasets: arrays on the mapped file, or h5py's where that is not possible."""

    def __init__(self, folder: Path, shard: Shard, fields: Mapping[str, Field]) -> None:
        self.path, self._count = folder / shard.path, shard.count
        self._lock = threading.Lock()
        check_shard(folder, shard)
        try:
            # No lock: thousands of readers, often on file systems that have none.
            self._file = h5py.File(self.path, "r", locking=False)
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._check_version()
            self._datasets: dict[str, Any] = {}
            for name, field in fields.items():
                if field.variable:
                    self._add_ragged(name, field)
                else:
                    self._add(name, name, field.dtype, (shard.count, *field.shape))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"shard {self.path} is damaged: {error}") from None
        if all(isinstance(dataset, np.ndarray) for dataset in self._datasets.values()):
            self._file.close()  # everything is mapped

    def rows(self, name: str, rows: Int64s) -> Array:
        """A gather, (n, *shape); `name` is a field, or FIELD/offsets."""
        dataset = self._datasets[name]
        if isinstance(dataset, np.ndarray):
            return dataset[rows]
        unique, inverse = np.unique(rows, return_inverse=True)  # h5py wants them ascending
        try:
            with self._lock:
                found: Array = dataset[unique]
        except (OSError, RuntimeError) as error:
            raise self._unreadable(name, rows, error) from None
        return found[inverse]

    def copy(self, name: str, start: int, stop: int, out: Array) -> None:
        """Copy elements `start` to `stop` of FIELD/values into `out`."""
        dataset = self._datasets[name]
        try:
            with self._lock:
                out[:] = dataset[start:stop]
        except (OSError, RuntimeError, ValueError) as error:
            raise self._unreadable(name, np.array([start, stop - 1]), error) from None

    def _check_version(self) -> None:
        """A shard of ours says so; HDF5 files of others have no such attribute."""
        found = self._file.attrs.get("format")
        if found == shard_format.FORMAT.encode():
            version = self._file.attrs.get("version")
            if version != shard_format.VERSION:
                raise DataError(
                    f"shard {self.path}: found version {version}, this hpctrain reads "
                    f"{shard_format.VERSION}"
                )

    def _add_ragged(self, name: str, field: Field) -> None:
        self._add(f"{name}/offsets", f"{name}/offsets", "int64", (self._count + 1,))
        self._add(f"{name}/values", f"{name}/values", field.dtype, (None, *field.shape))
        total = len(self._datasets[f"{name}/values"])
        ends = self.rows(f"{name}/offsets", np.array([0, self._count]))
        if ends.tolist() != [0, total]:
            raise DataError(
                f"shard {self.path}: field {name!r} has {total} values, its offsets go from "
                f"{ends[0]} to {ends[1]}"
            )

    def _add(self, key: str, path: str, dtype: str, shape: tuple[int | None, ...]) -> None:
        dataset = self._file.get(path)
        if not isinstance(dataset, h5py.Dataset):
            raise DataError(f"shard {self.path} has no dataset {path!r}; the index lists it")
        found = dataset.shape
        agrees = len(found) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, found, strict=True)
        )
        if dataset.dtype.newbyteorder("=") != dtype or not agrees:
            want = [size if size is not None else "any" for size in shape]
            raise DataError(
                f"shard {self.path}: {path!r} is {dataset.dtype.name} {list(found)}, the index "
                f"says {dtype} {want}"
            )
        offset = dataset.id.get_offset()
        if dataset.size == 0:
            self._datasets[key] = np.empty(found, dataset.dtype)
        elif offset is not None and offset % dataset.dtype.itemsize == 0 and not dataset.external:
            flat = np.frombuffer(self._map, dataset.dtype, dataset.size, offset)
            self._datasets[key] = flat.reshape(found)
        else:
            self._datasets[key] = dataset

    def _unreadable(self, name: str, rows: Int64s, error: Exception) -> DataError:
        return DataError(
            f"shard {self.path}: {name!r} cannot be read between {rows.min()} and {rows.max()}: "
            f"{error}"
        )


Visits = list[tuple[_OpenShard, Int64s, Int64s]]  # shard, rows of the result, rows of the shard


def _read_fixed(name: str, field: Field, visits: Visits, count: int) -> Array:
    if len(visits) == 1:  # the stable sort left the rows in the order asked
        shard, _, local = visits[0]
        return shard.rows(name, local).astype(field.dtype, copy=False)
    out = np.empty((count, *field.shape), field.dtype)
    for shard, rows, local in visits:
        out[rows] = shard.rows(name, local)
    return out


def _read_ragged(name: str, field: Field, visits: Visits, count: int) -> Ragged:
    starts, stops = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for shard, rows, local in visits:
        starts[rows] = shard.rows(f"{name}/offsets", local)
        stops[rows] = shard.rows(f"{name}/offsets", local + 1)
        if (starts[rows] > stops[rows]).any() or (starts[rows] < 0).any():
            raise DataError(f"shard {shard.path} is damaged: the offsets of {name!r} go back")
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    values = np.empty((int(offsets[-1]), *field.shape), field.dtype)
    for shard, rows, _ in visits:
        for row in rows.tolist():
            out = values[offsets[row] : offsets[row + 1]]
            shard.copy(f"{name}/values", int(starts[row]), int(stops[row]), out)
    return Ragged(values, offsets)
