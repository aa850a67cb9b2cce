"""The rows of CSV files.

The first rows of a CSV file decide the types of its columns. A later value of another type is
refused, and so is an integer that its column of floats would round, and a row with too few or too
many values. A file that is not UTF-8 cannot be read.
"""

import codecs
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np

from data_prep.console import size
from data_prep.formats.files import FileRange
from data_prep.formats.opening import one_line, opened, pyarrow
from hpctrain.base.errors import DataError

BLOCK = 4 * 2**20  # bytes that are parsed at once; those of the first block decide the types
SHOWN = 60  # characters of a value in a message
_EXACT = 2.0**53  # floats below this are exact if they are whole numbers
_LARGE = r"^\s*[+-]?\d{16,}\s*$"
_ROW = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )Row #(\d+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Csv:
    """How CSV is read."""

    delimiter: str = ""  # the character between values; "" is a comma, or a tab in .tsv files
    names: tuple[str, ...] = ()  # names of the columns, if the first row does not have them
    # Types of the columns, once they are known.
    types: Mapping[str, Any] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()  # columns of floats that must not round integers


def csv_schema(path: str, csv: Csv) -> Any:
    """Return the schema of the first rows."""
    with _csv(path, csv, {}) as reader:
        return reader.schema


def csv_rows(path: str, names: Sequence[str], csv: Csv) -> Iterator[tuple[Any, int]]:
    """Yield batches of the columns `names`, converted to the types of `csv`; see `rows_of`."""
    types = {name: csv.types[name] for name in names}
    exact, done = [name for name in names if name in csv.exact], 0
    with _csv(path, csv, types) as reader:
        for batch in reader:
            if exact and _may_be_rounded(batch.select(exact)):
                _check_exact(path, csv, exact)
                exact = []
            yield batch, done + 1
            done += batch.num_rows


def _check_exact(path: str, csv: Csv, names: Sequence[str]) -> None:
    """Check that no integer is rounded in columns of floats, by their texts."""
    done = 0
    with _csv(path, csv, dict.fromkeys(names, pyarrow().string())) as reader:
        for batch in reader:
            for name in names:
                for place, text in _rounded(batch.column(name)):
                    raise DataError(
                        f"{path}: row {done + 1 + place}: column {name!r} "
                        f"is read as floats, which would round {text[:SHOWN]!r}; --cast "
                        f"{name}=float64 allows that, --cast {name}=text keeps all as text"
                    )
            done += batch.num_rows


def _refused(path: str, csv: Csv, error: str) -> DataError:
    """Return the error for a row that Arrow refuses, with its number in the file."""
    if (match := _ROW.fullmatch(error)) is None:
        return DataError(f"{path} cannot be read as CSV: {error}")
    column, row, why = match.groups()
    # Arrow counts the header, if it reads it.
    where = f"{path}: row {int(row) - (not csv.names)}"
    if column is None:
        return DataError(f"{where}: {why[:200]}")
    name = list(csv.types)[int(column)]  # its place in the file
    value = why.rpartition(": ")[2][:200]
    return DataError(
        f"{where}: column {name!r}: {value} for {csv.types[name]}, the type of the first rows; "
        f"--cast {name}=text takes all as text, --cast {name}=float64 all as floats"
    )


@contextmanager
def _csv(path: str, csv: Csv, types: Mapping[str, Any]) -> Iterator[Any]:
    """Open a file, and yield Arrow's reader; without types it leaves out rows of another length."""
    pa = pyarrow()
    from pyarrow import csv as library

    tabs = ".tsv" in PurePath(path).suffixes
    with opened(FileRange(path)) as stream:
        text = _Utf8(stream)
        try:
            reader = library.open_csv(
                text,
                library.ReadOptions(
                    use_threads=False, column_names=csv.names or None, block_size=BLOCK
                ),
                library.ParseOptions(
                    delimiter=csv.delimiter or ("\t" if tabs else ","),
                    newlines_in_values=True,
                    invalid_row_handler=None if types else (lambda _: "skip"),
                ),
                library.ConvertOptions(column_types=types, include_columns=list(types) or None),
            )
            with reader:
                yield reader
        except _NotTextError as error:
            raise DataError(
                f"{path} is not UTF-8: {error}; `iconv -f cp1252 -t utf-8 FILE` converts what "
                "Excel has saved, -f utf-16 or another encoding what others have"
            ) from None
        except pa.ArrowException as error:
            if "straddling" in str(error):
                raise DataError(
                    f"{path} cannot be read as CSV: a row has more than {size(BLOCK)} of "
                    "text, or a quote in it is not closed; `data_prep python` converts longer rows"
                ) from None
            raise _refused(path, csv, one_line(error)) from None
        if types and text.quotes % 2:
            raise DataError(
                f"{path} has an odd number of quotes: one is not closed, and what follows it "
                'would be taken for one value; a quote inside of quotes is written twice, ""'
            )


class _NotTextError(Exception):
    """A byte is not possible in UTF-8 text."""


class _Utf8(io.RawIOBase):
    """The text of a stream; another encoding raises _NotTextError.

    `quotes` is their number so far: Arrow accepts a quote that is still open at the end.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._at, self.quotes = stream, 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""
        raw = self._stream.read(size)
        waiting, zero = self._decoder.getstate()[0], raw.find(b"\0")
        if zero >= 0:  # as UTF-16 has it without a byte order mark
            raise _NotTextError(f"byte {self._at + zero:,} is 0x00")
        try:
            if waiting or not raw.isascii():
                self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = self._at - len(waiting) + error.start
            raise _NotTextError(f"byte {place:,} is 0x{error.object[error.start]:02x}") from None
        self._at += len(raw)
        self.quotes += raw.count(b'"')
        return raw


def _may_be_rounded(batch: Any) -> bool:
    """Return whether columns of floats have values that are not exact if they were integers."""
    if not batch.num_rows or not batch.num_columns:
        return False
    matrix = batch.to_tensor(null_to_nan=True, row_major=False).to_numpy()
    return bool((np.abs(matrix) >= _EXACT).any())


def _rounded(texts: Any) -> Iterator[tuple[int, str]]:
    """Yield the place and the text of each integer of an array of texts that differs as a float."""
    from pyarrow import compute

    whole = compute.match_substring_regex(texts, _LARGE).fill_null(False)
    for place in np.flatnonzero(whole.to_numpy(zero_copy_only=False)).tolist():
        text = texts[place].as_py().strip()
        number = float(text)
        if len(text) > 310 or not np.isfinite(number) or int(text) != int(number):
            yield place, text
