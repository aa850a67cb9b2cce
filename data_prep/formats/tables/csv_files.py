"""The rows of CSV files.

The first rows of a CSV file decide the types of its columns. A later value of another type is
refused, and so is an integer that its column of floats would round, and a row with too few or too
many values. A file that is not UTF-8 cannot be read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

from data_prep.formats.files import Part, lines_of
from data_prep.formats.opening import one_line, opened, pyarrow
from data_prep.formats.tables.csv_text import NotTextError, Utf8, may_be_rounded, rounded
from data_prep.show.console import size
from hpctrain.errors import DataError

BLOCK = 4 * 2**20  # bytes that are parsed at once; those of the first block decide the types
SHOWN = 60  # characters of a value in a message
_ROW = re.compile(r"(?:In CSV column #(\d+): |CSV parse error: )Row #(\d+): (.*)", re.DOTALL)


class Rows(NamedTuple):
    """A batch of rows."""

    batch: Any  # a `pyarrow.RecordBatch`
    # Returns the number in the file (from 1) of a row of the batch (from 0).
    number: Callable[[int], int]


@dataclass(frozen=True)
class Csv:
    """How CSV is read."""

    delimiter: str = ""  # the character between values; "" is a comma, or a tab in .tsv files
    names: tuple[str, ...] = ()  # names of the columns, if the first row does not have them
    # Types of the columns, once they are known.
    types: Mapping[str, Any] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()  # columns of floats that must not round integers


def first_rows(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return the schema of the first rows, and these rows, or None if there are no rows."""
    with _csv(Part(path), csv, {}) as reader:
        return reader.schema, next(iter(reader), None)


def csv_rows(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`, converted to the types of `csv`."""
    types = {name: csv.types[name] for name in names}
    exact, done = [name for name in names if name in csv.exact], 0
    with _csv(part, csv, types) as reader:
        for batch in reader:
            if exact and may_be_rounded(batch.select(exact)):
                _check_exact(part, csv, exact)
                exact = []
            yield Rows(batch, partial(_number, part, csv, done + 1))
            done += batch.num_rows


def _check_exact(part: Part, csv: Csv, names: Sequence[str]) -> None:
    """Check that no integer of a part is rounded in columns of floats, by their texts."""
    done = 0
    with _csv(part, csv, dict.fromkeys(names, pyarrow().string())) as reader:
        for batch in reader:
            for name in names:
                for place, text in rounded(batch.column(name)):
                    raise DataError(
                        f"{part.path}: row {_number(part, csv, done + 1, place)}: column {name!r} "
                        f"is read as floats, which would round {text[:SHOWN]!r}; --cast "
                        f"{name}=float64 allows that, --cast {name}=text keeps all as text"
                    )
            done += batch.num_rows


def _number(part: Part, csv: Csv, first: int, row: int) -> int:
    """Return the number in the file of a row, if row 0 has the number `first` in the part."""
    return row + first + _rows_before(part, 0 if csv.names else 1)


def _refused(part: Part, csv: Csv, error: str) -> DataError:
    """Return the error for a row that Arrow refuses, with its number in the file."""
    if (match := _ROW.fullmatch(error)) is None:
        return DataError(f"{part.path} cannot be read as CSV: {error}")
    column, row, why = match.groups()
    # Arrow counts the header, if it reads it.
    number = _number(part, csv, int(row), 0 if csv.names or part.start else -1)
    where = f"{part.path}: row {number}"
    if column is None:
        return DataError(f"{where}: {why[:200]}")
    name = list(csv.types)[int(column)]  # its place in the file
    value = why.rpartition(": ")[2][:200]
    return DataError(
        f"{where}: column {name!r}: {value} for {csv.types[name]}, the type of the first rows; "
        f"--cast {name}=text takes all as text, --cast {name}=float64 all as floats"
    )


def _rows_before(part: Part, headers: int) -> int:
    """Count the rows of a CSV file before a part: its lines without the header; for messages."""
    if not part.start:
        return 0
    count, left = -headers, lines_of(part)[0]
    with open(part.path, "rb") as file:
        while left > 0 and (line := file.readline()):
            left -= len(line)
            count += bool(line.strip(b"\r\n"))
    return count


@contextmanager
def _csv(part: Part, csv: Csv, types: Mapping[str, Any]) -> Iterator[Any]:
    """Open a part, and yield Arrow's reader; without types it leaves out rows of another length."""
    pa = pyarrow()
    from pyarrow import csv as library

    names = list(csv.names) or (list(csv.types) if part.start else [])
    tabs = ".tsv" in PurePath(part.path).suffixes
    begin, end = lines_of(part)
    if begin == end:
        yield ()  # no row begins in this part
        return
    with opened(part) as stream:
        text = Utf8(stream, begin, end)
        try:
            reader = library.open_csv(
                text,
                library.ReadOptions(
                    use_threads=False, column_names=names or None, block_size=BLOCK
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
        except NotTextError as error:
            raise DataError(
                f"{part.path} is not UTF-8: {error}; `iconv -f cp1252 -t utf-8 FILE` converts what "
                "Excel has saved, -f utf-16 or another encoding what others have"
            ) from None
        except pa.ArrowException as error:
            if "straddling" in str(error):
                raise DataError(
                    f"{part.path} cannot be read as CSV: a row has more than {size(BLOCK)} of "
                    "text, or a quote in it is not closed; `data_prep python` converts longer rows"
                ) from None
            raise _refused(part, csv, one_line(error)) from None
        if types and text.quotes % 2:
            raise DataError(
                f"{part.path} has an odd number of quotes: one is not closed, and what follows it "
                'would be taken for one value; a quote inside of quotes is written twice, ""'
            )


def may_be_cut(path: str) -> bool:
    """Return whether each line of a file is a row, so that parts can be read on their own."""
    with open(path, "rb") as file:
        return not any(b'"' in block for block in iter(lambda: file.read(BLOCK), b""))
