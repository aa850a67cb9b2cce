"""Shards, version 1: plain HDF5 that h5ls, h5py and MATLAB read, and how a data set is written.

    /                      attributes: format "hpctrain-shard", version 1, split, count
    /image                 a fixed-size field: uint8 (count, 3, 64, 64)
    /label                 another: int64 (count,)
    /text/values           a variable-length field: uint8 (total,), the samples end to end
    /text/offsets          int64 (count + 1,): sample i is values[offsets[i]:offsets[i + 1]]

- The first axis of every dataset is the sample (of `values`: the element).
- Datasets are contiguous and not compressed, little-endian, and begin at a multiple of 4096
  bytes, so that a reader may map them; the dtypes are those of `index.DTYPES`.
- A file is named SPLIT-00000.h5. It holds as many samples as fit in `max_bytes` of data, and at
  least one.
- The same samples in the same order give the same bytes, however they were batched: no times
  are stored, and the layout is the oldest that HDF5 writes (by one version of HDF5).

A data set appears at once: shards are written and synced in `OUT/.hpctrain-partial/`, then moved
into OUT, and `index.json` last. A writer that is killed leaves that folder, which the next one
clears; one that raises leaves nothing.

    >>> write_shards(Path("out"), [("train", {"image": images, "label": labels})])
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from hpctrain.data import index as index_file
from hpctrain.data.index import Field, Index, Shard, check_name
from hpctrain.data.moments import Moments
from hpctrain.data.ragged import Array, Ragged
from hpctrain.data.schema import Batch, check_batch, check_fields, infer_fields, row_bytes
from hpctrain.data.shard import digest_file, write_shard
from hpctrain.errors import DataError, StorageError

MAX_BYTES = 256 * 2**20
PARTIAL = ".hpctrain-partial"
REPLACED = "replaced"  # in PARTIAL: the index of the data set that gives way


class ShardWriter:
    """Writes a data set into a folder; a context manager that leaves nothing after an exception.

    Memory: about a shard for each split, and one more while it is written.

    Args:
        folder: Made if it does not exist. A finished data set in it stays as it is until
            `finish` replaces it.
        fields: The schema; without it, that of the first batch.
        max_bytes: Data in one shard.

    Raises:
        DataError: A bad field.
        StorageError: The folder cannot be written, or another process is writing into it.
    """

    def __init__(
        self, folder: Path, fields: Mapping[str, Field] | None = None, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder, self._partial = Path(folder), Path(folder) / PARTIAL
        self._max_bytes = max_bytes
        self._fields = check_fields(fields) if fields is not None else {}
        self._splits: dict[str, _Split] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._folder)
            clear_leftovers(self._folder)
            self._partial.mkdir()
        except OSError as error:
            raise _storage_error(self._folder, error) from None

    def add(self, split: str, batch: Batch) -> None:
        """Append samples to `split`; they are copied.

        Args:
            split: Its name.
            batch: For each field (n, *shape); for a variable-length one a `Ragged` or a list of
                n arrays (length, *shape).

        Raises:
            DataError: A field is missing or unknown, or has another dtype, shape or count.
            StorageError: The disk is full or the folder not writable.
        """
        if batch and not any(len(value) for value in batch.values()):
            return
        if not self._fields:
            self._fields = check_fields(infer_fields(batch))
        rows = check_batch(batch, self._fields)
        if split not in self._splits:
            check_name(split, "split")
            self._splits[split] = _Split(split)
        state = self._splits[split]
        ends = np.cumsum(row_bytes(rows, self._fields))
        start, before = 0, 0
        while start < len(ends):
            room = self._max_bytes - state.bytes
            stop = int(np.searchsorted(ends, before + room, side="right"))
            if state.count == 0:
                stop = max(stop, start + 1)  # a sample larger than a shard is a shard
            if stop > start:
                state.append({name: _copy(value, start, stop) for name, value in rows.items()})
                state.bytes += int(ends[stop - 1]) - before
                start, before = stop, int(ends[stop - 1])
            if start < len(ends):
                self._flush(state)

    def finish(self, provenance: Mapping[str, Any] | None = None) -> Index:
        """Write what is left, move the shards into place, and the index last.

        Returns:
            The index that was written.

        Raises:
            DataError: There was no sample.
            StorageError: The disk is full or the folder not writable.
        """
        for state in self._splits.values():
            if state.count:
                self._flush(state)
        if not self._splits:
            raise DataError(f"nothing to write into {self._folder}: the source has no samples")
        index = Index(
            fields=self._fields,
            shards=tuple(shard for state in self._splits.values() for shard in state.shards),
            statistics={
                state.name: {name: moments.result() for name, moments in state.moments.items()}
                for state in self._splits.values()
            },
            provenance=dict(provenance or {}),
        )
        try:
            index.save(self._partial)
            _commit(self._folder, index)
        except OSError as error:
            raise _storage_error(self._folder, error) from None
        self._close()
        return index

    def abort(self) -> None:
        """Remove what was written so far; a finished data set in the folder stays."""
        with suppress(OSError):  # what made it fail may still be there; the next writer clears
            clear_leftovers(self._folder)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()

    def _flush(self, state: "_Split") -> None:
        """Write a split's samples as its next shard."""
        path = self._partial / f"{state.name}-{len(state.shards):05d}.h5"
        try:
            write_shard(path, state.name, self._fields, state.chunks)
            digest = digest_file(path, sync=True)
            size = path.stat().st_size
        except OSError as error:
            raise _storage_error(path, error) from None
        for name, chunks in state.chunks.items():
            if not self._fields[name].variable:
                moments = state.moments.setdefault(name, Moments())
                for chunk in chunks:
                    moments.add(chunk)
        elements = {
            name: sum(len(chunk.values) for chunk in chunks)
            for name, chunks in state.chunks.items()
            if self._fields[name].variable
        }
        state.shards.append(Shard(path.name, state.name, state.count, size, digest, elements))
        state.chunks, state.count, state.bytes = {}, 0, 0

    def _close(self) -> None:
        """Let other writers in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_shards(
    folder: Path,
    batches: Iterable[tuple[str, Batch]],
    *,
    fields: Mapping[str, Field] | None = None,
    max_bytes: int = MAX_BYTES,
    provenance: Mapping[str, Any] | None = None,
) -> Index:
    """Write (split, batch) pairs as a data set; see `ShardWriter`."""
    with ShardWriter(folder, fields, max_bytes) as writer:
        for split, batch in batches:
            writer.add(split, batch)
        return writer.finish(provenance)


def clear_leftovers(folder: Path) -> None:
    """Remove what an interrupted writer left; a finished data set stays."""
    partial = folder / PARTIAL
    kept = _listed(folder)
    for unfinished in (partial, partial / REPLACED):  # killed while moving: of neither data set
        for path in _listed(unfinished) - kept:
            (folder / path).unlink(missing_ok=True)
    if partial.exists():
        shutil.rmtree(partial)


class _Split:
    """A split's finished shards, and the samples that wait for the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shards: list[Shard] = []
        self.moments: dict[str, Moments] = {}
        self.chunks: dict[str, list[Any]] = {}
        self.count, self.bytes = 0, 0

    def append(self, rows: Mapping[str, Array | Ragged]) -> None:
        for name, value in rows.items():
            self.chunks.setdefault(name, []).append(value)
        self.count += len(next(iter(rows.values())))


def _copy(value: Array | Ragged, start: int, stop: int) -> Array | Ragged:
    """Samples `start` to `stop`, in native byte order."""
    if isinstance(value, Ragged):
        rows = value.rows(start, stop)
        return Ragged(_native(rows.values), rows.offsets)
    return _native(value[start:stop])


def _native(array: Array) -> Array:
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _commit(folder: Path, index: Index) -> None:
    """Move the shards from `.hpctrain-partial` into `folder`, the index last."""
    partial = folder / PARTIAL
    if (folder / index_file.FILE).exists():  # until the new one is there, there is none
        (partial / REPLACED).mkdir()
        os.replace(folder / index_file.FILE, partial / REPLACED / index_file.FILE)
    for shard in index.shards:
        os.replace(partial / shard.path, folder / shard.path)
    _sync(folder)
    os.replace(partial / index_file.FILE, folder / index_file.FILE)
    _sync(folder)
    clear_leftovers(folder)  # the replaced shards


def _listed(folder: Path) -> set[str]:
    """The shards that the index in `folder` lists; none without a readable index."""
    try:
        return {shard.path for shard in Index.load(folder).shards}
    except DataError:
        return set()


def _lock(folder: Path) -> int | None:
    """Hold `folder` against other writers, while the descriptor is open."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StorageError(f"another process is writing a data set into {folder}") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _sync(folder: Path) -> None:
    """Force a folder's renames to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror or error}")
