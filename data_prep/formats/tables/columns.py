"""Columns of Arrow data as fields: the field of each type, and values that cannot be stored.

Arrow type                field
ints, floats              the same dtype; uint64 is stored as int64 if all values fit
bool                      uint8
dates, times, durations   int64, in the unit of the type
string, binary            variable-length uint8; strings as UTF-8
fixed-size list           shape (k, …)
list of any of these      variable-length
dictionary-encoded        the field of the values
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.samples import lost
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import DTYPES, Field
from hpctrain.data.shards.ragged import Ragged, offsets_of
from hpctrain.data.shards.types import Array, Int64s

_CODES = "int32"  # dtype of the codes of categories
WHOLE = re.compile(r"[+-]?\d{1,300}")
SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Column:
    """A column and the field that it becomes; picklable."""

    name: str  # name in the source
    type: Any  # arrow type
    field: Field  # the field that stores it
    cast: str = ""  # the dtype of --cast, or ""
    # The value that replaces nulls, of `type`; None if rows with nulls cannot be used.
    null: Any = None
    categories: Sequence[Any] | None = None  # the values, if the field stores their codes

    @classmethod
    def of(
        cls,
        name: str,
        kind: Any,
        cast: str = "",
        null: str | None = None,
        categories: Sequence[Any] | None = None,
    ) -> "Column":
        """Decide what a column of the Arrow type `kind` becomes."""
        import pyarrow as pa

        kind = plain(kind)
        inner, shape, variable = _layout(kind)
        if cast and (cast not in DTYPES or _is_text(kind)):
            known = cast in DTYPES
            what = f"the column is {kind}" if known else f"the dtypes are {', '.join(DTYPES)}"
            raise ConfigError(f"--cast {name}={cast}: {what}")
        if categories is not None:
            field = Field(_CODES)
        elif _is_text(kind):
            field = Field("uint8", variable=True)
        else:
            dtype = _dtype(name, kind, inner)
            try:
                field = Field(cast or dtype, shape, variable)
            except DataError as error:
                raise DataError(f"the column {name!r} of {kind}: {error}") from None
        value = None
        if null is not None:
            if not _is_text(kind) and (variable or shape):
                raise ConfigError(f"--null {name}={null}: the column has lists, not single values")
            try:
                value = pa.scalar(null).cast(kind)
            except (pa.ArrowException, ValueError):
                raise ConfigError(f"--null {name}={null}: that is no {kind}") from None
            floating = pa.types.is_floating(kind)
            if floating and WHOLE.fullmatch(null) and value.as_py() != int(null):
                raise ConfigError(f"--null {name}={null}: a {kind} would round it")
        return cls(name, kind, field, cast, value, categories)

    def problems(self, array: Any) -> dict[int, str]:
        """Return the rows of an array that cannot be stored, each with the reason."""
        array = self._plain(array)
        found: dict[int, str] = {}
        rows = np.arange(len(array))
        if array.null_count:
            null = np.flatnonzero(_mask(array.is_null()))
            found = {int(row): f"column {self.name!r} is null; {self._hint()}" for row in null}
            array, rows = array.filter(array.is_valid()), np.delete(rows, null)
        if self.categories is not None:
            for i in np.flatnonzero(self._codes(array) < 0).tolist():
                found[int(rows[i])] = f"column {self.name!r}: {shown(array[i])} is no category"
            return found
        if _is_text(array.type):
            return found
        leaves, lengths = _flat(array)
        ends = np.cumsum(lengths) * math.prod(self.field.shape)

        def add(bad: Array, why: str) -> None:
            for leaf in np.flatnonzero(bad).tolist():
                row = int(rows[np.searchsorted(ends, leaf, side="right")])
                value = why.format(shown(leaves[leaf]))
                found.setdefault(row, f"column {self.name!r}{value}")

        if leaves.null_count:
            add(_mask(leaves.is_null()), " has a null inside")
        values = _numbers(leaves)
        if values.dtype == np.uint64 and not self.cast:
            add(values > np.uint64(2**63 - 1), ": {} is beyond int64, the largest integer type")
        elif self.cast:
            add(lost(values, np.dtype(self.cast)), f": {{}} is not possible in {self.cast}")
        return found

    def values(self, array: Any) -> Array | Ragged:
        """Convert an array without problems to (n, *shape) or to a `Ragged`."""
        array = self._plain(array)
        if self.categories is not None:
            return self._codes(array)
        if _is_text(array.type):
            return _text(array)
        leaves, lengths = _flat(array)
        values = _numbers(leaves)
        values = values.astype(self.field.dtype, copy=False).reshape(-1, *self.field.shape)
        return Ragged(values, offsets_of(lengths)) if self.field.variable else values

    def _plain(self, array: Any) -> Any:
        """Return the array without dictionaries; replace nulls if `null` is set."""
        import pyarrow as pa

        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if self.null is not None and array.null_count:
            array = array.fill_null(self.null.cast(array.type))
        return array

    def _codes(self, array: Any) -> NDArray[np.int32]:
        import pyarrow as pa
        from pyarrow import compute

        assert self.categories is not None
        known = pa.array(self.categories, array.type)
        codes = compute.index_in(array, value_set=known).fill_null(-1)
        return np.asarray(codes.to_numpy(zero_copy_only=False), _CODES)

    def _hint(self) -> str:
        if self.field.variable and not _is_text(self.type):
            return "a list may be empty, but has to be there"
        if self.field.shape:
            return "a list of a fixed size has to be there"
        return f"--null {self.name}=VALUE gives such rows a value"


def plain(kind: Any) -> Any:
    """Return the value type of a dictionary type; return other types unchanged."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def shown(value: Any) -> str:
    """Return a value of a column as text for a message."""
    text = repr(value.as_py() if hasattr(value, "as_py") else value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    texts = types.is_string, types.is_large_string, types.is_string_view
    binaries = types.is_binary, types.is_large_binary, types.is_binary_view
    return any(check(kind) for check in (*texts, *binaries))


def _mask(flags: Any) -> NDArray[np.bool_]:
    return np.asarray(flags.to_numpy(zero_copy_only=False))


def _layout(kind: Any) -> tuple[Any, tuple[int, ...], bool]:
    """Return the type of the numbers, the shape, and whether the length varies."""
    import pyarrow as pa

    variable = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    inner, shape = kind.value_type if variable else kind, list[int]()
    while pa.types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    return inner, tuple(shape), variable


def _dtype(name: str, kind: Any, inner: Any) -> str:
    """Return the dtype of a column's numbers, which have the type `inner`."""
    from pyarrow import types

    if types.is_boolean(inner):
        return "uint8"
    if types.is_uint64(inner) or (types.is_temporal(inner) and not types.is_interval(inner)):
        return "int64"
    if types.is_integer(inner) or types.is_floating(inner):
        return str(np.dtype(inner.to_pandas_dtype()).name)
    if types.is_decimal(inner):
        raise DataError(
            f"the column {name!r} is {kind}: no field holds such numbers; `cast` of pyarrow's "
            "tables, or of datasets, makes float64 or int64 of them"
        )
    how = "--columns or --drop leave it out"
    if types.is_struct(inner):
        how += "; `flatten()` of pyarrow's tables, or of datasets, makes columns of its members"
    raise DataError(f"the column {name!r} is {kind}, which no field can hold; {how}")


def _flat(array: Any) -> tuple[Any, Int64s]:
    """Return the numbers of all rows as one flat array, and the length of each row's list.

    No row may be null. The length of a row without a list is 1.
    """
    import pyarrow as pa
    from pyarrow import compute

    lengths = np.ones(len(array), np.int64)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        found = compute.list_value_length(array).to_numpy(zero_copy_only=False)
        array, lengths = array.flatten(), found.astype(np.int64)
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return array, lengths


def _numbers(array: Any) -> Array:
    """Return a flat array as NumPy. Nulls become zeros; `problems` reports them."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        array = array.cast(width).cast(pa.int64())
    if array.null_count:
        array = array.fill_null(pa.scalar(0).cast(array.type))
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.view(np.uint8) if values.dtype == bool else values


def _text(array: Any) -> Ragged:
    import pyarrow as pa

    array = array.cast(pa.large_binary())
    _, offsets, content = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    values = np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8)
    return Ragged(values[ends[0] : ends[-1]], ends - ends[0])
