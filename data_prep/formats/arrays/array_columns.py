"""A field made of several arrays one after the other, and their values as they will be stored."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from data_prep.formats.arrays.array_base import ArrayFile, Where, reading
from data_prep.formats.arrays.array_files import open_array
from data_prep.formats.samples import cast
from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array

Values = Array | list[Array]
"""Rows of a field: (n, *shape), or n arrays of any length."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """One array of a field, with `rows` samples."""

    where: Where
    rows: int
    dtype: str  # as it is stored


@dataclass(frozen=True)
class ArrayColumn:
    """The arrays of a field, one after the other."""

    name: str  # name of the field
    parts: tuple[ArrayPart, ...]  # the arrays
    axis: int | None = 0  # the axis that counts the samples; None: each array is a sample
    cast: str = ""  # the dtype to cast to, or ""
    text: bool = False  # whether the values are text, which is stored as UTF-8
    varies: int | None = None  # the axis of a sample whose length varies, or None
    nbytes: int = 0  # roughly the bytes of all samples
    note: str = ""  # what the user should know; or ""

    @cached_property
    def ends(self) -> list[int]:
        """Where each part ends."""
        return list(accumulate(part.rows for part in self.parts))

    def place(self, row: int) -> tuple[ArrayPart, int]:
        """Return the part that contains a row, and the row's number in it."""
        number = bisect_right(self.ends, row)
        return self.parts[number], row - (self.ends[number - 1] if number else 0)

    def spans(self, start: int, stop: int) -> Iterator[tuple[ArrayPart, int, int]]:
        """Yield each part that contains some of these rows, with their first and last number."""
        while start < stop:
            part, first = self.place(start)
            last = min(part.rows, first + stop - start)
            yield part, first, last
            start += last - first


class OpenColumn:
    """A column and the one of its files that is open. The user calls `close`."""

    def __init__(self, column: ArrayColumn) -> None:
        self.column = column
        self._part: ArrayPart | None = None
        self._file: ArrayFile | None = None

    def file(self, part: ArrayPart) -> ArrayFile:
        """Return the open file of a part; close the part that was open before."""
        if part is not self._part or self._file is None:
            self.close()
            self._file = open_array(part.where, self.column.axis)
            self._part = part
            if self._file.shape[0] != part.rows or self._file.dtype.str != part.dtype:
                raise DataError(f"{part.where} was changed while it was being read; run this again")
        return self._file

    def rows(self, start: int, stop: int) -> tuple[Values, dict[int, str]]:
        """Return the values, and for each row that cannot be used (from 0) the reason."""
        found = [self._span(*span) for span in self.column.spans(start, stop)]
        if len(found) == 1:
            return found[0]
        problems, before = {}, 0
        for array, bad in found:
            problems.update({before + row: why for row, why in bad.items()})
            before += len(array)
        arrays = [array for array, _ in found]
        if self.column.text or self.column.varies is not None:
            return [row for array in arrays for row in array], problems
        return np.concatenate(arrays), problems

    def _span(self, part: ArrayPart, start: int, stop: int) -> tuple[Values, dict[int, str]]:
        raw = self.file(part).rows(start, stop)
        if self.column.text:
            return [_utf8(text) for text in raw.tolist()], {}
        values, to = raw, self.column.cast
        problems: dict[int, str] = {}
        if values.dtype == bool:
            values = raw = values.view(np.uint8)
            _note(problems, values > 1, lambda row, at: f"{raw[row][at]} is no bool")
        if to:
            values, lost = cast(values, to)
            if lost is not None:
                _note(problems, lost, lambda row, at: f"{raw[row][at]} is no {to}")
        if self.column.varies is not None:
            return [np.moveaxis(row, self.column.varies, 0) for row in values], problems
        return values, problems

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _utf8(text: str | bytes) -> Array:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)


def _note(problems: dict[int, str], bad: Array, why: Any) -> None:
    """Add `why(row, place of its first bad value)` for each row with a bad value."""
    for row in np.flatnonzero(bad.reshape(len(bad), -1).any(1)).tolist():
        problems.setdefault(row, why(row, np.unravel_index(bad[row].argmax(), bad[row].shape)))


class _Kind(NamedTuple):
    """What the samples of an array are: the dtype to store, the shape, and whether it is text."""

    dtype: str
    shape: tuple[int, ...]
    text: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape) or ''}" if not self.text else "text"


def open_parts(
    name: str, wheres: list[Where], axis: int | None, to: str, *, unwritten: bool
) -> tuple[ArrayColumn, Field]:
    """Open and check each of a field's arrays once, and return the column and its field.

    With `unwritten`, the fill value may stand for values that were never written.
    """
    parts: list[ArrayPart] = []
    kinds: list[_Kind] = []
    nbytes = 0
    for where in wheres:
        with open_array(where, axis) as array:
            if (written := array.stored.written) is not None:
                with reading(where):
                    written.check(where, name, array.axis, accepted=unwritten)
            dtype = np.dtype("uint8") if array.text else array.dtype.newbyteorder("=")
            stored = to or ("uint8" if dtype.kind == "b" or array.text else dtype.name)
            if array.text and (to or array.shape[1:]):
                why = f"--cast {to} is for numbers" if to else "it has several texts in a sample"
                raise DataError(f"{where} is text: {why}")
            rows = array.shape[0]
            kinds.append(_Kind(stored, array.shape[1:], array.text))
            nbytes += math.prod(array.shape) * np.dtype(stored).itemsize
        if rows:
            parts.append(ArrayPart(where, rows, array.dtype.str))
    if not parts:
        raise DataError(f"{', '.join(map(str, wheres[:3]))} has no samples")
    schema, varies = _schema(name, wheres, kinds, whole=axis is None)
    note = (
        f"field {name!r}: the length varies along axis {varies} of {wheres[0]}, "
        f"{list(kinds[0].shape)}; it becomes the first axis, as in {schema}"
    )
    column = ArrayColumn(
        *(name, tuple(parts), axis, to),
        text=kinds[0].text,
        varies=varies,
        nbytes=nbytes,
        note=note if varies else "",
    )
    return column, schema


def _schema(
    name: str, wheres: list[Where], kinds: list[_Kind], *, whole: bool
) -> tuple[Field, int | None]:
    """Return the field of arrays, and the axis of a sample whose length varies, or None."""
    first, varying = kinds[0], set[int]()
    for where, kind in zip(wheres, kinds, strict=True):
        if kind == first:
            continue
        alike = kind._replace(shape=first.shape) == first and len(kind.shape) == len(first.shape)
        varying |= {i for i, size in enumerate(kind.shape) if alike and size != first.shape[i]}
        if not (whole and alike) or len(varying) > 1:
            can = f"; --cast {name}=DTYPE makes them one" if kind.shape == first.shape else ""
            if len(varying) > 1:
                can = "; the length may vary along one axis; `data_prep python` keeps other shapes"
            raise DataError(f"{wheres[0]} holds samples of {first}, {where} of {kind}{can}")
    varies = min(varying, default=None)
    shape = first.shape if varies is None else first.shape[:varies] + first.shape[varies + 1 :]
    try:
        return Field(first.dtype, shape, first.text or varies is not None), varies
    except DataError as error:
        can = f"; --cast {name}=int64 stores it, checked" if first.dtype == "uint64" else ""
        raise DataError(f"{wheres[0]}: {error}{can}") from None
