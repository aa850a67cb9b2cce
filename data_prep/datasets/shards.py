"""Compare the file of one shard with the index, and read its samples as the loader does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.source import BLOCK_BYTES
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.storage.layout import ShardLayout
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.errors import DataError


def blocks(
    layout: ShardLayout, fields: Mapping[str, Field], start: int, stop: int
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


def span(layout: ShardLayout, name: str, field: Field, start: int, stop: int) -> Array | Ragged:
    """Return samples of a field: an array (n, *shape), or a `Ragged` if its length varies."""
    if field.variable:
        offsets = ends(layout, name, start, stop)
        values = _values(layout, name, field, int(offsets[0]), int(offsets[-1]))
        return Ragged(values, offsets - offsets[0])
    rows = np.empty((stop - start, *field.shape), field.dtype)
    layout.rows[name].copy(start, stop, rows)
    return rows


def ends(layout: ShardLayout, name: str, start: int, stop: int) -> Int64s:
    """Return where sample `start` begins and where the samples to `stop` end, (n + 1,)."""
    offsets = np.empty(stop - start + 1, np.int64)
    layout.rows[f"{name}/offsets"].copy(start, stop + 1, offsets)
    _check_offsets(layout, name, offsets)
    return offsets


def check_offsets(layout: ShardLayout, name: str, count: int) -> None:
    """Check that the offsets of a variable-length field never go back."""
    for start in range(0, count, _BLOCK_SAMPLES):
        ends(layout, name, start, min(start + _BLOCK_SAMPLES, count))


def some(layout: ShardLayout, name: str, field: Field, rows: Int64s) -> Array | list[Array]:
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


def _rows(layout: ShardLayout, dataset: str, field: Field, rows: Int64s) -> Array:
    return layout.rows[dataset].rows(rows).astype(field.dtype, copy=False)


def _check_offsets(layout: ShardLayout, name: str, offsets: Int64s) -> None:
    """Check that offsets never decrease and do not go beyond the values."""
    inside = offsets[0] >= 0 and offsets[-1] <= layout.totals[f"{name}/values"]
    if not inside or (np.diff(offsets) < 0).any():
        raise DataError(f"shard {layout.path} is damaged: the offsets of {name!r} go back")


def _values(layout: ShardLayout, name: str, field: Field, start: int, stop: int) -> Array:
    values = np.empty((stop - start, *field.shape), field.dtype)
    if stop > start:
        layout.rows[f"{name}/values"].copy(start, stop, values)
    return values


_BLOCK_SAMPLES = 2**16

Rows = dict[str, Array | Ragged]


class OpenShard:
    """A shard whose file is as the index says, as far as that shows without reading samples."""

    def __init__(self, path: Path, shard: Shard, fields: Mapping[str, Field]) -> None:
        self.path, self.shard, self.fields = path, shard, fields
        with self._damage():
            self._layout = ShardLayout(path, shard, fields, mapped=False)

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

    def blocks(self) -> Iterator[Rows]:
        """Yield the samples in blocks of a few MB."""
        with self._damage():
            for _, rows in blocks(self._layout, self.fields, 0, self.shard.count):
                yield rows

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn the exceptions of h5py into a DataError."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            message = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"shard {self.path} is damaged: {message}") from None
        except MemoryError as error:
            raise DataError(f"shard {self.path}: a sample is too large to read: {error}") from None
