"""The rows of CSV files, and the numbers of those that cannot be used.

The first rows of a CSV file decide the types of its columns. A row with a later value of another
type cannot be used and is reported, and so is a row with an integer that its column of floats would
round. A file that is not UTF-8 cannot be read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from data_prep.formats.files import Part, lines_of
from data_prep.formats.opening import one_line, opened, pyarrow
from data_prep.formats.tables.columns import shown
from data_prep.formats.tables.csv_text import (
    NotTextError,
    Utf8,
    convert_values,
    may_be_rounded,
)
from data_prep.show.console import size
from hpctrain.errors import DataError

BLOCK = 4 * 2**20
FIRST = 2**20  # bytes at the beginning of a file; their values decide the types
# A file whose first line is long has many columns. Its blocks have about LINES lines, so that the
# time that each column of a block costs does not dominate; but at least FEW lines, whatever fits.
LONG, LINES, FEW, LARGE = 2**14, 64, 8, 2**26
LONGEST = 2**24  # bytes of the first line that are looked at


class Rows(NamedTuple):
    """A batch of rows, and the rows in it or between them that cannot be used."""

    batch: Any  # a `pyarrow.RecordBatch`
    bad: Mapping[int, str]  # for each row of the batch that cannot be used, the reason
    # The rows of the file that are not in the batch: number in the file and reason.
    missing: Sequence[tuple[int, str]]
    # Returns the number in the file (from 1) of a row of the batch (from 0).
    number: Callable[[int], int]


@dataclass(frozen=True)
class Csv:
    """How CSV is read."""

    delimiter: str = ""  # the character between values; "" is a comma, or a tab in .tsv files
    names: tuple[str, ...] = ()  # names of the columns, if the first row does not have them
    # Bytes of text that are parsed at once; 0 is BLOCK, and FIRST for the first rows.
    block: int = 0
    # Types of the columns, once they are known.
    types: Mapping[str, Any] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()  # columns of floats that must not round integers

    def for_width(self, path: str) -> "Csv":
        """Return the same with larger blocks if the file has many columns."""
        with opened(Part(path)) as stream:
            line = len(stream.readline(LONGEST))
        if line <= LONG:
            return self
        return replace(self, block=max(BLOCK, min(LINES * line, LARGE), FEW * line))


def first_rows(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return the schema of the first rows, and these rows, or None if there are no rows."""
    with _csv(Part(path), csv, {}, None, max(FIRST, csv.block)) as reader:
        return reader.schema, next(iter(reader), None)


def csv_rows(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`, converted to the types of `csv`."""
    # Convert whole batches. From the first one that fails, read bytes and convert them by value.
    types = {name: csv.types[name] for name in names}
    exact = [i for i, name in enumerate(names) if name in csv.exact]
    invalid = _Invalid(part, csv)
    done = 0
    try:
        with _csv(part, csv, types, invalid) as reader:
            for batch in reader:
                if exact and may_be_rounded(batch.select(exact)):
                    raise _ByValueError
                yield from invalid.rows(batch, {}, done)
                done += batch.num_rows
    except _ByValueError:
        seen = 0
        with _csv(part, csv, dict.fromkeys(names, pyarrow().binary()), invalid) as reader:
            for batch in reader:
                fresh = batch.slice(max(0, done - seen))
                if fresh.num_rows:
                    converted, bad = convert_values(fresh, types, frozenset(exact))
                    yield from invalid.rows(converted, bad, seen + batch.num_rows - fresh.num_rows)
                seen += batch.num_rows
    yield from invalid.rest()


class _ByValueError(Exception):
    """A value does not have the type of its column, or may be rounded: look at each value."""


class _Invalid:
    """The rows with too few or too many values, and the numbers in the file of all others.

    It is pyarrow's handler for invalid rows, also of those that are read a second time.
    """

    def __init__(self, part: Part, csv: Csv) -> None:
        # pyarrow counts the header as a row if it reads the header.
        self._header = 0 if csv.names or part.start else 1
        self._skipped = 0 if csv.names else 1
        self._part, self._reasons = part, dict[int, str]()
        self._told = 0  # so many of them were reported

    def __call__(self, row: Any) -> str:
        self._reasons[row.number] = (
            f"it has {row.actual_columns} {'value' if row.actual_columns == 1 else 'values'}, not "
            f"{row.expected_columns}: {shown(row.text)}"
        )
        return "skip"

    def rows(self, batch: Any, bad: Mapping[int, str], first: int) -> Iterator[Rows]:
        """Yield a batch that begins after `first` valid rows, and invalid rows before its end."""
        if batch.num_rows:
            last = self._physical(first + batch.num_rows - 1)
            missing = self._untold(last)
            yield Rows(batch, bad, missing, lambda row: self._number(self._physical(first + row)))

    def rest(self) -> Iterator[Rows]:
        """Yield the invalid rows after the last batch."""
        missing = self._untold(None)
        if missing:
            batch = pyarrow().RecordBatch.from_pydict({})
            yield Rows(batch, {}, missing, lambda row: row)

    def _untold(self, before: int | None) -> list[tuple[int, str]]:
        rows = sorted(row for row in self._reasons if before is None or row < before)
        rows, self._told = rows[self._told :], len(rows)
        return [(self._number(row), self._reasons[row]) for row in rows]

    def _physical(self, row: int) -> int:
        """Return pyarrow's number of the valid row `row`: it counts the invalid ones too."""
        number = row + 1 + self._header
        for invalid in sorted(self._reasons):
            if invalid > number:
                break
            number += 1
        return number

    def _number(self, physical: int) -> int:
        return physical - self._header + _rows_before(self._part, self._skipped)


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
def _csv(
    part: Part, csv: Csv, types: Mapping[str, Any], invalid: "_Invalid | None", block: int = 0
) -> Iterator[Any]:
    """Open a part, and yield Arrow's reader."""
    pa = pyarrow()
    from pyarrow import csv as library

    block = block or csv.block or BLOCK
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
                    use_threads=False, column_names=names or None, block_size=block
                ),
                library.ParseOptions(
                    delimiter=csv.delimiter or ("\t" if tabs else ","),
                    newlines_in_values=True,
                    # Without a handler only the types are needed; `csv_rows` reports such rows.
                    invalid_row_handler=invalid or (lambda _: "skip"),
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
            if "conversion error" in str(error) and invalid is not None:
                raise _ByValueError from None
            if "straddling" in str(error):
                raise DataError(
                    f"{part.path} cannot be read as CSV: a row has more than {size(block)} of "
                    "text, or a quote in it is not closed; `data_prep python` converts longer rows"
                ) from None
            raise DataError(f"{part.path} cannot be read as CSV: {one_line(error)}") from None
        if invalid is not None and text.quotes % 2:
            raise DataError(
                f"{part.path} has an odd number of quotes: one is not closed, and what follows it "
                'would be taken for one value; a quote inside of quotes is written twice, ""'
            )


def may_be_cut(path: str) -> bool:
    """Return whether each line of a file is a row, so that parts can be read on their own."""
    with open(path, "rb") as file:
        return not any(b'"' in block for block in iter(lambda: file.read(BLOCK), b""))
