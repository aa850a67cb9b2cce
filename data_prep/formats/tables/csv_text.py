"""The text of CSV files, which is checked as it is read, and their values one by one.

Values are looked at one by one where a whole batch cannot be converted, or where a float may have
been rounded.
"""

import codecs
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from data_prep.formats.opening import pyarrow
from data_prep.formats.tables.columns import shown


class NotTextError(Exception):
    """A byte is not possible in UTF-8 text."""


class Utf8(io.RawIOBase):
    """The text of a stream from byte to byte of the file; another encoding raises NotTextError.

    `quotes` is their number so far: Arrow accepts a quote that is still open at the end.
    """

    def __init__(self, stream: BinaryIO, begin: int, end: int) -> None:
        self._stream, self._at, self._end, self.quotes = stream, begin, end, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""
        raw = self._stream.read(min(size, self._end - self._at))
        waiting, zero = self._decoder.getstate()[0], raw.find(b"\0")
        if zero >= 0:  # as UTF-16 has it without a byte order mark
            raise NotTextError(f"byte {self._at + zero:,} is 0x00")
        try:
            if waiting or not raw.isascii():
                self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = self._at - len(waiting) + error.start
            raise NotTextError(f"byte {place:,} is 0x{error.object[error.start]:02x}") from None
        self._at += len(raw)
        self.quotes += raw.count(b'"')
        return raw


_EXACT = 2.0**53  # floats below this are exact if they are whole numbers
WHOLE = re.compile(rb"\s*[+-]?\d+\s*")


def may_be_rounded(batch: Any) -> bool:
    """Return whether columns of floats have values that are not exact if they were integers."""
    if not batch.num_rows or not batch.num_columns:
        return False
    matrix = batch.to_tensor(null_to_nan=True, row_major=False).to_numpy()
    return bool((np.abs(matrix) >= _EXACT).any())


def convert_values(
    batch: Any, types: Mapping[str, Any], exact: frozenset[int]
) -> tuple[Any, dict[int, str]]:
    """Convert a batch of bytes to types; also return the rows with a value that is impossible."""
    pa = pyarrow()
    columns, bad = [], dict[int, str]()
    for i, (name, kind) in enumerate(types.items()):
        values = batch.column(i).to_pylist()
        for row in list(_wrong(values, 0, kind)):
            hint = f"--cast {name}=text takes all as text"
            if pa.types.is_integer(kind) and _is_float(values[row]):
                hint += f", --cast {name}=float64 all as floats"
            text = shown(values[row].decode())
            bad.setdefault(
                row, f"column {name!r}: {text} is no {kind}, as the first rows have; {hint}"
            )
            values[row] = b""
        columns.append(_parsed(values, kind))
        for row in _rounded(values, columns[-1]) if i in exact else ():
            bad.setdefault(
                row,
                f"column {name!r} is read as floats, which would round "
                f"{shown(values[row].decode())}; --cast {name}=float64 allows that, "
                f"--cast {name}=text keeps all as text",
            )
    return pa.RecordBatch.from_arrays(columns, names=list(types)), bad


def _is_float(value: bytes) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _rounded(values: Sequence[bytes], floats: Any) -> Iterator[int]:
    """Yield the places of the values that are integers, and differ from their floats."""
    numbers = floats.to_numpy(zero_copy_only=False)
    for i in np.flatnonzero(np.abs(numbers) >= _EXACT).tolist():
        if WHOLE.fullmatch(values[i]):
            digits, number = values[i].strip(), float(numbers[i])
            if len(digits) > 310 or not np.isfinite(number) or int(digits) != int(number):
                yield i


def _wrong(values: Sequence[bytes], first: int, kind: Any) -> Iterator[int]:
    """Yield the places of the values that cannot be converted, found by halving."""
    try:
        _parsed(values, kind)
    except pyarrow().ArrowInvalid:
        if len(values) == 1:
            yield first
            return
        half = len(values) // 2
        yield from _wrong(values[:half], first, kind)
        yield from _wrong(values[half:], first + half, kind)


def _parsed(values: Sequence[bytes], kind: Any) -> Any:
    """Convert values by the rules that hold for a whole file."""
    from pyarrow import csv

    quoted = b"".join(b'"' + value.replace(b'"', b'""') + b'"\n' for value in values)
    table = csv.read_csv(
        io.BytesIO(quoted),
        csv.ReadOptions(use_threads=False, column_names=["v"], block_size=len(quoted) + 1),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types={"v": kind}),
    )
    array = table.column("v").combine_chunks()
    pa = pyarrow()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
