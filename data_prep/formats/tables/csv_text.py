"""The text of CSV files as UTF-8, the only encoding that Arrow reads, and their values one by one.

The encoding is that of the byte order mark, as Excel writes it for UTF-16, or else that of
--encoding, or else UTF-8. Values are looked at one by one where a whole batch cannot be converted,
or where a float may have been rounded.
"""

import codecs
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from data_prep.formats.files import Part
from data_prep.formats.opening import opened, pyarrow
from data_prep.formats.tables.columns import shown
from hpctrain.errors import ConfigError, DataError

# UTF-32 comes first: its mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}
ASCII = bytes(range(128))
CURE = "--encoding NAME gives the encoding, such as cp1252 (Excel's); latin-1 takes any bytes"


class NotTextError(Exception):
    """A byte is not possible in the encoding of the file."""


def check_encoding(name: str) -> str:
    """Return the standard name of an encoding that --encoding gives; "" stays ""."""
    try:
        "a".encode(name or "utf-8")
    except (LookupError, UnicodeError):
        raise ConfigError(
            f"--encoding {name}: there is no such encoding; utf-8, utf-16, cp1252, latin-1 and "
            "others that Python has are allowed"
        ) from None
    found = codecs.lookup(name).name if name else ""
    return "utf-8" if found == "utf-8-sig" else found


def encoding_of(path: str, given: str) -> str:
    """Return the encoding of a file; `given` is used if it has no byte order mark."""
    with opened(Part(path)) as stream:
        head = stream.read(4)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if given in ("utf-16", "utf-32"):
        raise DataError(
            f"{path} has no byte order mark, which {given} needs; --encoding {given}-le (or "
            f"{given}-be) reads text without one"
        )
    return given or "utf-8"


def ends_lines_with_one_byte(encoding: str) -> bool:
    """Return whether the byte 10 always ends a line, so that a file may be cut there."""
    try:
        return ASCII.decode(encoding) == ASCII.decode("ascii")
    except UnicodeDecodeError:
        return False


def first_line(path: str, given: str, most: int) -> bytes:
    """Return the bytes of the first line, at most `most`."""
    with opened(Part(path)) as stream:
        line = stream.readline(most)
    if b"\0" in line and not given and not line.startswith(tuple(_MARKS)):
        order = "le" if line.find(b"\0") % 2 else "be"
        raise DataError(
            f"{path} has zero bytes in its first line, as UTF-16 without a byte order mark has; "
            f"--encoding utf-16-{order} reads it"
        )
    return line


class Utf8(io.RawIOBase):
    """The text of a stream as UTF-8 without byte order mark, from byte to byte of the file.

    `quotes` is their number so far: Arrow accepts a quote that is still open at the end.
    """

    def __init__(self, stream: BinaryIO, encoding: str, begin: int, end: int) -> None:
        self._stream, self._encoding, self.quotes = stream, encoding, 0
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._left, self._at, self._end = b"", begin, end  # UTF-8 that waits, and the place

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return exactly `size` bytes, or fewer at the end."""
        held, more = [self._left], True
        count = len(self._left)
        while count < size and more:
            raw = self._stream.read(min(size, self._end - self._at))
            more = bool(raw)
            held.append(self._utf8(raw))
            count += len(held[-1])
        content = b"".join(held)
        content, self._left = content[:size], content[size:]
        self.quotes += content.count(b'"')
        return content

    def _utf8(self, raw: bytes) -> bytes:
        if not self._at and self._encoding == "utf-8" and raw.startswith(codecs.BOM_UTF8):
            self._at, raw = len(codecs.BOM_UTF8), raw[len(codecs.BOM_UTF8) :]
        waiting = self._decoder.getstate()[0]
        if raw.isascii() and not waiting and self._encoding == "utf-8":
            self._at += len(raw)
            return raw
        try:
            text = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = self._at - len(waiting) + error.start
            raise NotTextError(f"byte {place:,} is 0x{error.object[error.start]:02x}") from None
        except UnicodeError as error:  # some encodings name no byte
            raise NotTextError(f"{error}") from None
        self._at += len(raw)
        return raw if self._encoding == "utf-8" else text.encode()


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
