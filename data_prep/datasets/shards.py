"""Compare the file of one shard with the index, and read its samples as the loader does."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from data_prep.source import BLOCK_BYTES
from hpctrain.errors import DataError
from hpctrain.shards import shard as shard_format
from hpctrain.shards.field import Field
from hpctrain.shards.index import Shard, check_shard
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.storage.chunk_table import filters
from hpctrain.shards.storage.chunks import undecodable
from hpctrain.shards.storage.codecs import codec
from hpctrain.shards.storage.inside import Elsewhere, find
from hpctrain.shards.storage.layout import INTEGERS, Layout, disagreement
from hpctrain.shards.types import Array, Int64s


def blocks(
    layout: Layout, fields: Mapping[str, Field], start: int, stop: int
) -> Iterator[tuple[int, dict[str, Array | Ragged]]]:
    """Yield (first row, samples) for the rows `start` to `stop`, in blocks of a few MB."""
    fixed = sum(field.nbytes for field in fields.values() if not field.variable)
    step = max(1, BLOCK_BYTES // max(8, fixed))
    while start < stop:
        end = min(start + step, stop)
        size = np.arange(1, end - start + 1) * fixed
        for name, field in fields.items():
            if field.variable:
                offsets = ends(layout, name, start, end)
                size = size + (offsets[1:] - offsets[0]) * field.nbytes
        count = max(1, int(np.searchsorted(size, BLOCK_BYTES, side="right")))
        yield (
            start,
            {
                name: span(layout, name, field, start, start + count)
                for name, field in fields.items()
            },
        )
        start += count


def span(layout: Layout, name: str, field: Field, start: int, stop: int) -> Array | Ragged:
    """Return samples of a field: an array (n, *shape), or a `Ragged` if its length varies."""
    if field.variable:
        offsets = ends(layout, name, start, stop)
        values = _values(layout, name, field, int(offsets[0]), int(offsets[-1]))
        return Ragged(values, offsets - offsets[0])
    rows = np.empty((stop - start, *field.shape), field.dtype)
    layout.rows[name].copy(start, stop, rows)
    return rows


def ends(layout: Layout, name: str, start: int, stop: int) -> Int64s:
    """Return where sample `start` begins and where the samples to `stop` end, (n + 1,)."""
    offsets = np.empty(stop - start + 1, np.int64)
    layout.rows[f"{name}/offsets"].copy(start, stop + 1, offsets)
    _check_offsets(layout, name, offsets)
    return offsets


def check_offsets(layout: Layout, name: str, count: int) -> None:
    """Check that the offsets of a variable-length field never go back."""
    for start in range(0, count, _BLOCK_SAMPLES):
        ends(layout, name, start, min(start + _BLOCK_SAMPLES, count))


def some(layout: Layout, name: str, field: Field, rows: Int64s) -> Array | list[Array]:
    """Return one field's samples in the order of `rows`.

    It is an array (n, *shape), or n arrays (length, *shape) for a variable-length field.
    """
    if not field.variable:
        return _rows(layout, name, field, rows)
    places = np.stack([rows, rows + 1], axis=1).reshape(-1)
    pairs = _rows(layout, f"{name}/offsets", Field("int64"), places).reshape(-1, 2)
    found: list[Any] = [None] * len(rows)
    for i in np.argsort(rows, kind="stable").tolist():
        _check_offsets(layout, name, pairs[i])
        found[i] = _values(layout, name, field, *pairs[i].tolist())
    return found


def _rows(layout: Layout, dataset: str, field: Field, rows: Int64s) -> Array:
    return layout.rows[dataset].rows(rows).astype(field.dtype, copy=False)


def _check_offsets(layout: Layout, name: str, offsets: Int64s) -> None:
    """Check that offsets never decrease and do not go beyond the values."""
    inside = offsets[0] >= 0 and offsets[-1] <= layout.totals[f"{name}/values"]
    if not inside or (np.diff(offsets) < 0).any():
        raise DataError(f"shard {layout.path} is damaged: the offsets of {name!r} go back")


def _values(layout: Layout, name: str, field: Field, start: int, stop: int) -> Array:
    values = np.empty((stop - start, *field.shape), field.dtype)
    if stop > start:
        layout.rows[f"{name}/values"].copy(start, stop, values)
    return values


_BLOCK_SAMPLES = 2**16

Rows = dict[str, Array | Ragged]


class OpenShard:
    """The open file of a shard; a context manager."""

    def __init__(self, path: Path, shard: Shard, fields: Mapping[str, Field]) -> None:
        self.path, self.shard, self.fields = path, shard, fields
        check_shard(path, shard)
        with self._damage():
            self._file = h5py.File(path, "r", locking=False)

    def problems(self) -> Iterator[str]:
        """Yield the differences from the index that show without reading samples."""
        with self._damage():
            yield from self._wrong_attributes()
            for name, field in self.fields.items():
                values, offsets = field.datasets(name)
                count = self.shard.count
                if offsets:
                    # The offsets in files of other programs may be of any integer type.
                    yield from self._wrong(offsets, ("int64", *INTEGERS), [count + 1])
                    yield from self._wrong(values, (field.dtype,), [None, *field.shape])
                else:
                    shape: list[int | None] = [*field.shape]
                    shape.insert(field.axis, count)
                    yield from self._wrong(values, (field.dtype,), shape)

    def check_offsets(self) -> None:
        """Read the offsets of the variable-length fields, and check them."""
        for name, field in self.fields.items():
            if not field.variable:
                continue
            with self._damage():
                check_offsets(self._layout, name, self.shard.count)
            total = self._layout.totals[f"{name}/values"]
            listed = self.shard.elements.get(name, total)
            if listed != total:
                raise DataError(f"field {name!r} has {total} values, the index lists {listed}")

    def rows(self, name: str, start: int, stop: int) -> Array | Ragged:
        """Return samples of a field in native byte order: an array (n, *shape), or a `Ragged`."""
        with self._damage():
            return span(self._layout, name, self.fields[name], start, stop)

    def lengths(self, name: str, start: int, stop: int) -> Array:
        """Return the lengths of a variable-length field's samples, int64 (n,); reads no values."""
        with self._damage():
            return np.diff(ends(self._layout, name, start, stop))

    def blocks(self, count: int) -> Iterator[Rows]:
        """Yield the first `count` samples in blocks of a few MB."""
        with self._damage():
            for _, rows in blocks(self._layout, self.fields, 0, count):
                yield rows

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.path, self.shard, self.fields, mapped=False)

    def layout(self, name: str) -> str:
        """Say how a field's values are stored: `contiguous`, or `chunks of 64, zstd, 2.1:1`."""
        with self._damage():
            dataset = self._file[self.fields[name].datasets(name)[0]]
            if dataset.chunks is None:
                return "contiguous"
            codecs = [codec(each) for each in filters(dataset)]
            stored = dataset.id.get_storage_size()
            ratio = f"{dataset.nbytes / stored:.1f}:1" if stored else "nothing stored"
            chunk = " x ".join(map(str, dataset.chunks))
            return ", ".join([f"chunks of {chunk}", *(codecs or ["not compressed"]), ratio])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _wrong_attributes(self) -> Iterator[str]:
        """Compare the attributes of a shard in our format; adopted files do not have them."""
        attributes = self._file.attrs
        if attributes.get("format") != shard_format.FORMAT.encode():
            return
        shard = self.shard
        want = {"version": shard_format.VERSION, "split": shard.split, "count": shard.count}
        for key, value in want.items():
            found = attributes.get(key)
            text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
            if isinstance(found, np.ndarray) or text != value:
                yield f"its {key} is {text}, the index says {value}"

    def _wrong(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int | None]
    ) -> Iterator[str]:
        try:
            dataset = find(self._file, name)
        except Elsewhere as error:
            yield f"{name!r} {error}; the index's digest does not cover that"
            return
        if dataset is None:
            yield f"there is no dataset {name!r}; the index lists it"
            return
        if (differs := disagreement(dataset, dtypes, shape)) is not None:
            yield f"{name!r} is {differs[0]}, the index lists {differs[1]}"
        for each in undecodable(dataset):
            yield (
                f"{name!r} is compressed with {codec(each)}, which this HDF5 has no decoder for: "
                "pip install 'hpctrain[codecs]'"
            )

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn the exceptions of h5py into a DataError."""
        try:
            yield
        except PermissionError as error:
            reason = os.strerror(error.errno or errno.EACCES)
            raise DataError(f"shard {self.path} cannot be read: {reason}") from None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            message = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"shard {self.path} is damaged: {message}") from None
        except MemoryError as error:
            raise DataError(f"shard {self.path}: a sample is too large to read: {error}") from None
