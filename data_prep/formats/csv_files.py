"""The rows of CSV files, and those that cannot be used, by their numbers.

CSV has the types that its first rows have, for all rows: a later value of another type cannot be
used, and is named.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, cast

from data_prep.formats.columns import shown
from data_prep.formats.files import LinesOf, Part
from data_prep.formats.opening import one_line, opened, pyarrow
from hpctrain.errors import DataError

BLOCK = 4 * 2**20
FIRST = 2**20  # bytes whose values decide the types


class Rows(NamedTuple):
    """A batch of rows, and those among them, or between them, that cannot be used.

    Attributes:
        batch: A `pyarrow.RecordBatch`.
        bad: Row in the batch -> why it cannot be used.
        missing: Rows that are not in it: their number and why.
        number: Of a row in the batch: its number in the file, from 1.
    """

    batch: Any
    bad: Mapping[int, str]
    missing: Sequence[tuple[int, str]]
    number: Callable[[int], int]


@dataclass(frozen=True)
class Csv:
    """How CSV is read.

    Attributes:
        delimiter: "" is a comma, and a tabulator in .tsv.
        names: Of the columns, where the first row does not have them.
        quotes: Whether a value may stand in quotes; otherwise they are characters like others.
        types: Of the columns, once they are known.
    """

    delimiter: str = ""
    names: tuple[str, ...] = ()
    quotes: bool = True
    types: Mapping[str, Any] = field(default_factory=dict)


def first_rows(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return the schema that the first rows have, and these; None: there are none.

    Raises:
        DataError: It cannot be read as CSV.
    """
    with _csv(Part(path), csv, {}, None, FIRST) as reader:
        return reader.schema, next(iter(reader), None)


def csv_rows(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`, by the types of `csv`.

    Raises:
        DataError: The file cannot be read.
    """
    # All values at once; where that fails, from there on value by value.
    types = {name: csv.types[name] for name in names}
    invalid = _Invalid(part, csv)
    done = 0
    try:
        with _csv(part, csv, types, invalid) as reader:
            for batch in reader:
                yield from invalid.rows(batch, {}, done)
                done += batch.num_rows
    except _OtherType:
        pa = pyarrow()
        again = _Invalid(part, csv, invalid.told)
        seen = 0
        with _csv(part, csv, dict.fromkeys(names, pa.binary()), again) as reader:
            for batch in reader:
                fresh = batch.slice(max(0, done - seen))
                if fresh.num_rows:
                    converted, bad = _converted(fresh, types)
                    yield from again.rows(converted, bad, seen + batch.num_rows - fresh.num_rows)
                seen += batch.num_rows
        invalid = again
    yield from invalid.rest()


class _OtherType(Exception):
    """A value is not of its column's type."""


class _Invalid:
    """Rows with too few or too many values, and the numbers of the others."""

    def __init__(self, part: Part, csv: Csv, told: int = 0) -> None:
        # pyarrow counts the header as a row, where it reads it.
        self._header = 0 if csv.names or part.start else 1
        self._skipped = 0 if csv.names else 1
        self._part, self._reasons, self.told = part, dict[int, str](), told

    def __call__(self, row: Any) -> str:
        text = shown(row.text)
        self._reasons[row.number] = (
            f"it has {row.actual_columns} values, not {row.expected_columns}: {text}"
        )
        return "skip"

    def rows(self, batch: Any, bad: Mapping[int, str], first: int) -> Iterator[Rows]:
        """The rows of a batch that begins after `first` rows, and the invalid among them."""
        if batch.num_rows:
            last = self._physical(first + batch.num_rows - 1)
            missing = self._untold(last)
            yield Rows(batch, bad, missing, lambda row: self._number(self._physical(first + row)))

    def rest(self) -> Iterator[Rows]:
        """The invalid rows after the last batch."""
        missing = self._untold(None)
        if missing:
            batch = pyarrow().RecordBatch.from_pydict({})
            yield Rows(batch, {}, missing, lambda row: row)

    def _untold(self, before: int | None) -> list[tuple[int, str]]:
        rows = sorted(row for row in self._reasons if before is None or row < before)
        rows, self.told = rows[self.told :], len(rows)
        return [(self._number(row), self._reasons[row]) for row in rows]

    def _physical(self, row: int) -> int:
        """The number that pyarrow has for the valid row `row`."""
        number = row + 1 + self._header
        for invalid in sorted(self._reasons):
            if invalid > number:
                break
            number += 1
        return number

    def _number(self, physical: int) -> int:
        return physical - self._header + _rows_before(self._part, self._skipped)


def _rows_before(part: Part, headers: int) -> int:
    """The rows of a CSV file before a part: its lines, less the header; for messages only."""
    if not part.start:
        return 0
    with io.BufferedReader(LinesOf(part.path, 0, part.start)) as file:
        return sum(1 for line in file if line.strip(b"\r\n")) - headers


def _converted(batch: Any, types: Mapping[str, Any]) -> tuple[Any, dict[int, str]]:
    """The values of a batch of bytes by their types, and the rows where one is not of it."""
    pa = pyarrow()
    columns, bad = [], dict[int, str]()
    for name, kind in types.items():
        values = batch.column(name).to_pylist()
        wrong = list(_wrong(values, 0, kind))
        for row in wrong:
            why = "no UTF-8" if pa.types.is_string(kind) else f"no {kind}, as the first rows have"
            text = shown(values[row].decode(errors="backslashreplace"))
            hint = "" if pa.types.is_string(kind) else f"; --cast {name}=text takes all as text"
            bad.setdefault(row, f"column {name!r}: {text} is {why}{hint}")
            values[row] = b""
        columns.append(_parsed(values, kind))
    return pa.RecordBatch.from_arrays(columns, names=list(types)), bad


def _wrong(values: Sequence[bytes], first: int, kind: Any) -> Iterator[int]:
    """Halve what fails until the single values are found."""
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
    """Values by the same rules as in a file."""
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


class _Quotes(io.RawIOBase):
    """A stream whose quotes are counted: Arrow takes an open one for closed at the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.count = stream, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return how much."""
        content = self._stream.read(len(buffer))
        self.count += content.count(b'"')
        buffer[: len(content)] = content
        return len(content)


@contextmanager
def _csv(
    part: Part, csv: Csv, types: Mapping[str, Any], invalid: Any, block: int = 0
) -> Iterator[Any]:
    pa = pyarrow()
    from pyarrow import csv as library

    names = list(csv.names) or (list(csv.types) if part.start else None)
    tabs = ".tsv" in PurePath(part.path).suffixes
    with opened(part) as stream:
        if part.start and not cast(io.BufferedReader, stream).peek(1):
            yield ()  # no row begins in this part
            return
        counted = _Quotes(stream)
        try:
            reader = library.open_csv(
                counted,
                library.ReadOptions(
                    use_threads=False, column_names=names, block_size=block or BLOCK
                ),
                library.ParseOptions(
                    delimiter=csv.delimiter or ("\t" if tabs else ","),
                    quote_char='"' if csv.quotes else False,
                    newlines_in_values=csv.quotes,
                    # None: only the types are asked for; `csv_rows` tells of such rows.
                    invalid_row_handler=invalid or (lambda _: "skip"),
                ),
                library.ConvertOptions(column_types=types, include_columns=list(types) or None),
            )
            with reader:
                yield reader
        except (pa.ArrowException, UnicodeDecodeError) as error:
            if "conversion error" in str(error) and invalid is not None:
                raise _OtherType from None
            raise DataError(f"{part.path} cannot be read as CSV: {one_line(error)}") from None
        if csv.quotes and invalid is not None and counted.count % 2:
            raise DataError(
                f"{part.path} has an odd number of quotes: one is not closed, and what follows it "
                "would be taken for one value; --no-quotes takes quotes as they are"
            )


def has_quotes(path: str) -> bool:
    """Whether there is any, so that a line may be half a row."""
    with open(path, "rb") as file:
        return any(b'"' in block for block in iter(lambda: file.read(BLOCK), b""))
