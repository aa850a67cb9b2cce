"""Samples that come one by one: infer fields from values, check values, and collect blocks.

A value is cast to the dtype of its field if that does not change it. Otherwise the record cannot
be used: no value is silently cut off, wrapped around or rounded.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.source import BLOCK_BYTES, SampleBlock
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array

_RECORD_BYTES = 64  # counted for each sample, so that empty samples fill a block too


_OTHER_SHAPES = (
    "--variable takes any length of the first axis (docs/data.md: Samples of different shapes)"
)


class Unusable(Exception):
    """The reason why a record cannot be used. The source passes it to `BadRecords.bad`."""


def _array_of(value: Any) -> Array:
    """Convert an array, a number or nested lists of numbers to an array without loss.

    Text becomes its UTF-8 bytes; text and bytes are uint8 (length,). A bool becomes uint8. An image
    of Pillow becomes (channels, height, width).
    """
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise Unusable(f"text that is no Unicode: {error.reason}") from None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        raise Unusable("a masked array with masked values; fill them")
    if type(value).__module__.startswith("PIL."):
        return _array_of_image(value)
    try:
        array = np.asarray(value)
    except Exception as error:  # __array__ may raise anything
        raise Unusable(f"{type(value).__name__} is no array: {error}") from None
    if array.dtype == bool:
        return array.view(np.uint8) if array.ndim else array.astype(np.uint8)
    if array.dtype.kind not in "iuf":
        what = type(value).__name__ if array.dtype == object else f"dtype {array.dtype}"
        raise Unusable(f"{what} is neither real numbers, text nor bytes")
    if isinstance(value, (list, tuple)) and array.dtype.kind == "f":
        _check_whole(value)
    return array


def _array_of_image(image: Any) -> Array:
    """Convert an image of Pillow to (channels, height, width), as `images` stores it."""
    if image.mode.startswith("P"):
        raise Unusable("an image with a palette; image.convert('RGB') gives its colours")
    array = np.asarray(image)
    array = array.view(np.uint8) if array.dtype == bool else array
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


def field_of(value: Any, *, variable: bool = False) -> Field:
    """Return the field for values like this one, the first."""
    array = _array_of(value)
    variable = variable or isinstance(value, (str, bytes, bytearray, memoryview))
    if variable and array.ndim == 0:
        raise Unusable("a single number has no length that could vary")
    shape = array.shape[1:] if variable else array.shape
    try:
        return Field(array.dtype.newbyteorder("=").name, shape, variable)
    except DataError as error:
        raise Unusable(str(error)) from None


def fields_of(values: Mapping[str, Any], variable: Sequence[str] = ()) -> dict[str, Field]:
    """Return the schema for samples like this one, the first; see `field_of`."""
    fields = {}
    if unknown := sorted(set(variable) - set(values)):
        raise ConfigError(f"--variable {unknown[0]}: the fields are {', '.join(values)}")
    for name, value in values.items():
        try:
            fields[name] = field_of(value, variable=name in variable)
        except Unusable as error:
            raise Unusable(f"field {name!r}: {error}") from None
    return fields


def fitted(value: Any, field: Field) -> Array:
    """Convert a value to the dtype of a field, and check its shape."""
    array = _array_of(value)
    if field.variable and array.shape == (0,):
        array = array.reshape(0, *field.shape)
    found = array.shape[1:] if field.variable and array.ndim else array.shape
    if found != field.shape or (field.variable and not array.ndim):
        raise Unusable(
            f"found {array.dtype.name}{list(array.shape)}, the field is {field}; {_OTHER_SHAPES}"
        )
    dtype = np.dtype(field.dtype)
    if array.dtype == dtype:
        return array
    result, changed = cast(array, field.dtype)
    if array.dtype.kind == dtype.kind == "f":  # digits that get lost
        with np.errstate(all="ignore"):
            changed = (result.astype(array.dtype) != array) & ~np.isnan(array)
    if changed is not None and changed.any():
        example = array[changed].reshape(-1)[0]
        raise Unusable(f"{array.dtype.name} {example} cannot be stored as {field.dtype} exactly")
    return result


def fit_all(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Array]:
    """Convert a sample, which must have exactly these fields; see `fitted`."""
    if values.keys() != fields.keys():
        missing = ", ".join(repr(name) for name in fields if name not in values)
        unknown = ", ".join(repr(name) for name in values if name not in fields)
        problems = [f"it has no {missing}"] if missing else []
        problems += [f"it has {unknown}, the first sample has not"] if unknown else []
        raise Unusable("; ".join(problems))
    sample = {}
    for name, field in fields.items():
        try:
            sample[name] = fitted(values[name], field)
        except Unusable as error:
            raise Unusable(f"field {name!r}: {error}") from None
    return sample


class SampleCollector:
    """Collects samples into blocks.

    If they have no keys (`keyed`), their content decides the split, or values of a column
    (`columned`).
    """

    def __init__(
        self, fields: Mapping[str, Field], *, keyed: bool = True, columned: bool = False
    ) -> None:
        self._fields, self._keyed, self._columned = fields, keyed, columned
        self._clear()

    def _clear(self) -> None:
        fixed = [field for field in self._fields.values() if not field.variable]
        room = BLOCK_BYTES // (_RECORD_BYTES + sum(field.nbytes for field in fixed)) + 1
        # Samples of a fixed size are copied at once, while the processor's cache still has them.
        self._values: dict[str, Array | list[Array]] = {
            name: [] if field.variable else np.empty((room, *field.shape), field.dtype)
            for name, field in self._fields.items()
        }
        self._keys: list[bytes] = []
        self._column: list[str] = []
        self._records: list[str] = []
        self._bytes = 0
        self.file = ""  # that of the first sample

    def __len__(self) -> int:
        return len(self._records)

    @property
    def full(self) -> bool:
        """Whether the samples fill a block."""
        return self._bytes >= BLOCK_BYTES

    def add(
        self, sample: Mapping[str, Array], file: str, record: str, key: bytes, column: str
    ) -> None:
        """Add a sample that fits the schema. The block must not be `full`."""
        for name, value in sample.items():
            values = self._values[name]
            if isinstance(values, list):
                values.append(value)
            else:
                values[len(self)] = value
            self._bytes += value.nbytes
        self.file = self.file or file
        self._records.append(record)
        self._keys.append(key)
        self._column.append(column)
        self._bytes += _RECORD_BYTES

    def take(self) -> SampleBlock:
        """Return the samples (at least one) as a block, and begin the next block."""
        values = {
            name: found if isinstance(found, list) else found[: len(self)]
            for name, found in self._values.items()
        }
        block = SampleBlock(
            values,
            keys=self._keys if self._keyed else None,
            column=self._column if self._columned else None,
            file=self.file,
            records=self._records.__getitem__,
        )
        self._clear()
        return block


def is_name(field: Field) -> bool:
    """Return whether the values of a field can be names of splits: text or whole numbers."""
    if field.variable:
        return field.dtype == "uint8" and not field.shape
    return not field.shape and not field.dtype.startswith("float")


def text_of(value: Array) -> str:
    """Return such a value as text."""
    return bytes(value).decode(errors="replace") if value.ndim else str(value.item())


def key_of(content: str | bytes, key: str) -> Any:
    """Return the value of a key of a JSON object."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not JSON: {error}") from None
    if not isinstance(values, dict) or key not in values:
        raise Unusable(f"there is no key {key!r}")
    return values[key]


def _check_whole(value: Any) -> None:
    """Check that integers among floats were converted exactly."""
    for number in np.asarray(value, object).flat:
        if isinstance(number, int) and (abs(number) > 2**1000 or int(float(number)) != number):
            raise Unusable(f"{number} among floats cannot be stored as float64 exactly")


def cast(array: Array, dtype: str) -> tuple[Array, NDArray[np.bool_] | None]:
    """Cast an array; also return a mask of the numbers that change (None if there are none)."""
    target = np.dtype(dtype)
    with np.errstate(all="ignore"):
        result = array.astype(target, copy=False)
    changed = lost(array, target)
    return result, changed if changed.any() else None


def lost(values: Array, to: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return a mask of the numbers that `to` cannot hold.

    Rounding a float to fewer digits is no loss. A number beyond the range of `to`, a fraction cast
    to an integer, and an integer that a float has to round are losses.
    """
    exact = to.kind != "f" or values.dtype.kind == "f" or values.dtype.itemsize < 8
    if exact and np.can_cast(values.dtype, to, "safe"):
        return np.zeros(values.shape, bool)
    bad: NDArray[np.bool_]
    with np.errstate(all="ignore"):
        if to.kind == "f" and values.dtype.kind == "f":
            bad = np.isfinite(values) & ~np.isfinite(values.astype(to))
            return bad
        if to.kind == "f":
            there = values.astype(to).astype(np.float64)
            limit = 2.0**64 if values.dtype == np.uint64 else 2.0**63
            fits = np.isfinite(there) & (there < limit)
            bad = ~fits | (np.where(fits, there, 0).astype(values.dtype) != values)
            return bad
        info = np.iinfo(to)
        if values.dtype.kind == "f":
            wide = values.astype(np.float64)
            # float(max) is 2**63 for int64, which is too large; the others are exact.
            fits = (wide >= float(info.min)) & (wide < float(info.max) + (info.bits < 64))
            bad = ~fits | (np.floor(wide) != wide)
            return bad
    bad = (values < info.min) | (values > info.max)
    return bad
