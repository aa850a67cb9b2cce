"""The rows of CSV files, and the numbers of those that cannot be used.

The first rows of a CSV file decide the types of its columns. A row with a later value of another
type cannot be used and is reported.
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
FIRST = 2**20  # bytes at the beginning of a file; their values decide the types


class Rows(NamedTuple):
    """A batch of rows, and the rows in it or between them that cannot be used.

    Attributes:
        batch: A `pyarrow.RecordBatch`.
        bad: For each row of the batch that cannot be used, the reason.
        missing: The rows of the file that are not in the batch: number in the file and reason.
        number: Returns the number in the file (from 1) of a row of the batch (from 0).
    """

    batch: Any
    bad: Mapping[int, str]
    missing: Sequence[tuple[int, str]]
    number: Callable[[int], int]


@dataclass(frozen=True)
class Csv:
    """How CSV is read.

    Attributes:
        delimiter: The character between values; "" is a comma, or a tab in .tsv files.
        names: Names of the columns, if the first row does not have them.
        quotes: Whether a value may be in quotes; otherwise quotes are ordinary characters.
        types: Types of the columns, once they are known.
    """

    delimiter: str = ""
    names: tuple[str, ...] = ()
    quotes: bool = True
    types: Mapping[str, Any] = field(default_factory=dict)


def first_rows(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return the schema of the first rows, and these rows, or None if there are no rows.

    Raises:
        DataError: The file cannot be read as CSV.
    """
    with _csv(Part(path), csv, {}, None, FIRST) as reader:
        return reader.schema, next(iter(reader), None)


def csv_rows(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`, converted to the types of `csv`.

    Raises:
        DataError: The file cannot be read.
    """
    # Convert whole batches. From the first one that fails, read bytes and convert them by value.
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
    """A value does not have the type of its column."""


class _Invalid:
    """The rows with too few or too many values, and the numbers in the file of all others.

    It is pyarrow's handler for invalid rows. `told` counts those that were reported already.
    """

    def __init__(self, part: Part, csv: Csv, told: int = 0) -> None:
        # pyarrow counts the header as a row if it reads the header.
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
        rows, self.told = rows[self.told :], len(rows)
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
    with io.BufferedReader(LinesOf(part.path, 0, part.start)) as file:
        return sum(1 for line in file if line.strip(b"\r\n")) - headers


def _converted(batch: Any, types: Mapping[str, Any]) -> tuple[Any, dict[int, str]]:
    """Convert a batch of bytes to types; also return the rows with a value of another type."""
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


class _Quotes(io.RawIOBase):
    """A stream that counts quotes: Arrow accepts a quote that is still open at the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.count = stream, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` and return the number of bytes read."""
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
                    # Without a handler only the types are needed; `csv_rows` reports such rows.
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
    """Return whether a file has quotes: then a line may be only a part of a row."""
    with open(path, "rb") as file:
        return any(b'"' in block for block in iter(lambda: file.read(BLOCK), b""))
