"""A field of several arrays, one behind the other, and their values as they are to be stored."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from data_prep.formats.array_base import ArrayFile, Where
from data_prep.formats.array_files import open_array
from data_prep.formats.packing import Packing, cast
from hpctrain.data.field import Field
from hpctrain.data.types import Array
from hpctrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a field: `rows` samples."""

    where: Where
    rows: int
    packing: Packing


@dataclass(frozen=True)
class Column:
    """A field's arrays, one behind the other."""

    name: str
    parts: tuple[Part, ...]
    axis: int = 0
    cast: str = ""
    external: bool = False
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Note where each part ends."""
        object.__setattr__(self, "ends", list(accumulate(part.rows for part in self.parts)))

    def place(self, row: int) -> tuple[Part, int]:
        """The part that a row is in, and its number there."""
        number = bisect_right(self.ends, row)
        return self.parts[number], row - (self.ends[number - 1] if number else 0)

    def spans(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Each part's share of these rows: the part, and the rows' numbers there."""
        while start < stop:
            part, first = self.place(start)
            last = min(part.rows, first + stop - start)
            yield part, first, last
            start += last - first


class OpenColumn:
    """A column, and the file of it that is being read; `close` it."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self._part: Part | None = None
        self._file: ArrayFile | None = None

    def file(self, part: Part) -> ArrayFile:
        """Open a part, and close the one before."""
        if part is not self._part or self._file is None:
            self.close()
            self._file = open_array(part.where, self.column.axis, external=self.column.external)
            self._part = part
            if self._file.shape[0] != part.rows or self._file.dtype.str != part.packing.stored:
                raise DataError(f"{part.where} was changed while it was being read; run this again")
        return self._file

    def rows(self, start: int, stop: int) -> tuple[Array, dict[int, str]]:
        """The values, and why rows (from 0) cannot be used."""
        found = [self._span(*span) for span in self.column.spans(start, stop)]
        if len(found) == 1:
            return found[0]
        problems, before = {}, 0
        for array, bad in found:
            problems.update({before + row: why for row, why in bad.items()})
            before += len(array)
        return np.concatenate([array for array, _ in found]), problems

    def _span(self, part: Part, start: int, stop: int) -> tuple[Array, dict[int, str]]:
        raw = self.file(part).rows(start, stop)
        values, missing = part.packing.read(raw)
        problems: dict[int, str] = {}
        if values.dtype == bool:
            values = values.view(np.uint8)
            _note(problems, values > 1, lambda row, at: f"{values[row][at]} is no bool")
        to, before = self.column.cast, values
        if missing is not None and to.startswith("float"):
            # Whole numbers with gaps, as the floats that were asked for: what is missing is NaN.
            values, lost = cast(np.where(missing, np.zeros_like(values), values), to)
            values = np.where(missing, np.array(np.nan, to), values)
        else:
            if missing is not None:
                _note(
                    problems,
                    missing,
                    lambda row, at: (
                        f"{missing[row].sum()} values are missing (stored as {raw[row][at]}); "
                        f"--cast {self.column.name}=float32 or float64 makes them NaN, --packed "
                        f"{self.column.name} keeps them"
                    ),
                )
            values, lost = cast(values, to) if to else (values, None)
        if lost is not None:
            _note(problems, lost, lambda row, at: f"{before[row][at]} is no {to}")
        return values, problems

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _note(problems: dict[int, str], bad: Array, why: Any) -> None:
    """Note `why(row, where in it)` for each row with something bad."""
    for row in np.flatnonzero(bad.reshape(len(bad), -1).any(1)).tolist():
        problems.setdefault(row, why(row, np.unravel_index(bad[row].argmax(), bad[row].shape)))


def open_parts(
    name: str, wheres: list[Where], axis: int, to: str, *, unpack: bool, external: bool
) -> tuple[Column, Field]:
    """Look at a field's arrays, each of which is opened for a moment.

    Args:
        name: Of the field.
        wheres: Its arrays, in their order.
        axis: That is the sample.
        to: The dtype to cast to; "": as it is.
        unpack: Go by scale_factor and the like.
        external: HDF5 files may lead to others.

    Raises:
        DataError: One cannot be read or stored, or is not like the first; or none has samples.
    """
    parts: list[Part] = []
    schema: Field | None = None
    for where in wheres:
        with open_array(where, axis, external=external) as array:
            attributes = array.attributes if unpack else {}
            packing = Packing.of(str(where), array.dtype, attributes)
            dtype = np.dtype(packing.dtype)
            stored = to or ("uint8" if dtype.kind == "b" else dtype.name)
            rows, shape = array.shape[0], array.shape[1:]
        try:
            this = Field(stored, shape)
        except DataError as error:
            can = f"; --cast {name}=int64 stores it, checked" if stored == "uint64" else ""
            raise DataError(f"{where}: {error}{can}") from None
        schema = schema or this
        if this != schema:
            can = f"; --cast {name}=DTYPE makes them one" if this.shape == schema.shape else ""
            raise DataError(f"{wheres[0]} holds samples of {schema}, {where} of {this}{can}")
        if rows:
            parts.append(Part(where, rows, packing))
    if schema is None or not parts:
        raise DataError(f"{', '.join(map(str, wheres[:3]))} has no samples")
    return Column(name, tuple(parts), axis, to, external), schema
