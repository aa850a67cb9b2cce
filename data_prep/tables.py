"""Tables in files: their schema, how they are cut, and their rows by Arrow; CSV, Parquet, Arrow.

CSV has the types that its first rows have, for all rows: a later value of another type cannot be
used, and is named. A file of CSV with quotes is one piece, as a line in it may be half a row.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, cast

from data_prep.columns import shown
from data_prep.files import LinesOf, Part, ranges
from data_prep.opening import GROWTH, one_line, open_parquet, opened, pyarrow
from data_prep.source import SourceFile
from hpctrain.errors import ConfigError, DataError

CSV_BLOCK = 4 * 2**20
FIRST = 2**20  # bytes of CSV whose values decide the types
BLOCK_BYTES = 8 * 2**20
ROWS = 2**16  # of a batch at most
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
PATTERNS = ("*.csv", "*.csv.gz", "*.tsv", "*.tsv.gz", *(f"*{s}" for s in list(SUFFIXES)[2:]))


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


def format_of(path: str) -> str:
    """Return "csv", "parquet" or "arrow".

    Raises:
        ConfigError: It is none of them.
    """
    name = PurePath(path)
    packed = name.suffix in GROWTH
    kind = SUFFIXES.get(PurePath(name.stem).suffix if packed else name.suffix, "")
    if not kind or (packed and kind != "csv"):
        raise ConfigError(f"{path}: table reads {', '.join(PATTERNS)}")
    return kind


def schema_of(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return a file's `pyarrow.Schema` and, of CSV, its first rows.

    Raises:
        DataError: It cannot be read, or has two columns of the same name.
    """
    kind, first = format_of(path), None
    if kind == "parquet":
        with open_parquet(path) as table:
            schema = table.schema_arrow
    elif kind == "arrow":
        with _arrow(path) as reader:
            schema = reader.schema
    else:
        with _csv(Part(path), csv, {}, None, FIRST) as reader:
            schema = reader.schema
            first = next(iter(reader), None)
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise DataError(f"{path} has {len(twice)} columns twice, such as {min(twice)!r}")
    return schema, first


def parts_of(file: SourceFile, nbytes: int, csv: Csv) -> Iterator[tuple[Part, int]]:
    """Cut a file; yield the parts with the bytes of data in them, about."""
    path, kind = file.path, format_of(file.path)
    if kind == "parquet":
        with open_parquet(path) as table:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).total_byte_size
                yield Part(path, group, group + 1), size
    elif kind == "arrow":
        with _arrow(path) as reader:
            count = getattr(reader, "num_record_batches", 0)  # a stream does not tell
        for start, stop in ranges(count, max(1, int(count * nbytes / max(1, file.size)))):
            yield Part(path, start, stop), file.size * (stop - start) // count
        if not count:
            yield Part(path), file.size
    elif PurePath(path).suffix in GROWTH:
        yield Part(path), int(file.size * GROWTH[PurePath(path).suffix])
    elif file.size <= nbytes or (csv.quotes and _has_quotes(path)):
        yield Part(path), file.size
    else:
        for start, stop in ranges(file.size, nbytes):
            yield Part(path, start, stop), stop - start


def rows_of(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`.

    Raises:
        DataError: The file cannot be read.
    """
    kind = format_of(part.path)
    if kind == "csv":
        yield from _csv_rows(part, names, csv)
        return
    batches = _parquet_batches if kind == "parquet" else arrow_batches
    for batch, first in batches(part, names):
        yield Rows(batch, {}, (), partial(add, first + 1))


def _parquet_batches(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    with open_parquet(part.path) as table:
        groups = [table.metadata.row_group(i) for i in range(part.stop)]
        first = sum(group.num_rows for group in groups[: part.start])
        size = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        count = min(ROWS, max(1, BLOCK_BYTES // max(1, size)))
        which = list(range(part.start, part.stop))
        for batch in table.iter_batches(count, row_groups=which, columns=list(names)):
            yield _checked(batch, names), first
            first += batch.num_rows


def arrow_batches(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yield `pyarrow.RecordBatch`es of a few MB and how many rows are before them in the file.

    Raises:
        DataError: The file cannot be read.
    """
    with _arrow(part.path) as reader:
        first, batches = 0, iter(reader) if not part.stop else iter(())
        if part.stop:
            first = sum(reader.get_batch(i).num_rows for i in range(part.start))
            batches = (reader.get_batch(i) for i in range(part.start, part.stop))
        for batch in batches:
            batch = _checked(batch, names)
            count = max(1, min(ROWS, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, count):
                yield batch.slice(start, count), first + start
            first += batch.num_rows


def _checked(batch: Any, names: Sequence[str]) -> Any:
    """The columns asked for; lengths that lead out of their buffers would crash us later."""
    batch = batch.select(list(names))
    batch.validate(full=True)
    return batch


def _csv_rows(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """By the types at once; where that fails, from there on value by value."""
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
    part: Part, csv: Csv, types: Mapping[str, Any], invalid: Any, block: int = CSV_BLOCK
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
                library.ReadOptions(use_threads=False, column_names=names, block_size=block),
                library.ParseOptions(
                    delimiter=csv.delimiter or ("\t" if tabs else ","),
                    quote_char='"' if csv.quotes else False,
                    newlines_in_values=csv.quotes,
                    invalid_row_handler=invalid,
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


@contextmanager
def _arrow(path: str) -> Iterator[Any]:
    """A reader of an Arrow file (Feather is one), or of a stream."""
    pa = pyarrow()
    try:
        with pa.memory_map(path) as file:
            try:
                reader = pa.ipc.open_file(file)
            except pa.ArrowInvalid:
                file.seek(0)
                reader = pa.ipc.open_stream(file)
            with reader:
                yield reader
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Arrow: {one_line(error)}") from None


def _has_quotes(path: str) -> bool:
    with open(path, "rb") as file:
        return any(b'"' in block for block in iter(lambda: file.read(CSV_BLOCK), b""))
