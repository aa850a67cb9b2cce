"""Tables in CSV, Parquet and Arrow files: their schema, their parts, and their rows.

A CSV file with quotes is a single part, because a line may be only a part of a row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add
from pathlib import PurePath
from typing import Any

import numpy as np

from data_prep.formats.files import Part, ranges
from data_prep.formats.opening import (
    GROWTH,
    OTHERS,
    ROWS,
    one_line,
    open_parquet,
    parquet_rows,
    pyarrow,
)
from data_prep.formats.tables.columns import plain
from data_prep.formats.tables.csv_files import Csv, Rows, csv_rows, first_rows, may_be_cut
from data_prep.source import BLOCK_BYTES, SourceFile
from hpctrain.errors import ConfigError, DataError

_MAGIC = b"ARROW1"  # an Arrow file begins and ends with it
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
PATTERNS = ("*.csv", "*.csv.gz", "*.tsv", "*.tsv.gz", *(f"*{s}" for s in list(SUFFIXES)[2:]))


def format_of(path: str) -> str:
    """Return the format of a file by its ending: "csv", "parquet" or "arrow"."""
    name = PurePath(path)
    packed = name.suffix in GROWTH
    kind = SUFFIXES.get(PurePath(name.stem).suffix if packed else name.suffix, "")
    if not kind or (packed and kind != "csv"):
        raise ConfigError(f"{path}: table reads {', '.join(PATTERNS)}; for others, {OTHERS}")
    return kind


def schema_of(path: str, csv: Csv) -> tuple[Any, Any]:
    """Return a file's `pyarrow.Schema` and, for CSV, its first rows."""
    kind, first = format_of(path), None
    if kind == "parquet":
        with open_parquet(path) as table:
            schema = table.schema_arrow
    elif kind == "arrow":
        with _arrow(path) as reader:
            schema = reader.schema
            len(schema.names)  # decodes them: a damaged name may be no UTF-8
    else:
        schema, first = first_rows(path, csv)
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        more = f", and {len(twice) - 1} other names twice" if len(twice) > 1 else ""
        raise DataError(f"{path} has more than one column {min(twice)!r}{more}")
    return schema, first


def parts_of(file: SourceFile, nbytes: int, csv: Csv) -> Iterator[tuple[Part, int]]:
    """Cut a file into parts; yield each with the approximate bytes of its data."""
    path, kind = file.path, format_of(file.path)
    if kind == "parquet":
        with open_parquet(path) as table:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).total_byte_size
                yield Part(path, group, group + 1), size
    elif kind == "arrow":
        with _arrow(path) as reader:
            count = getattr(reader, "num_record_batches", 0)  # a stream does not have the number
        for start, stop in ranges(count, max(1, int(count * nbytes / max(1, file.size)))):
            yield Part(path, start, stop), file.size * (stop - start) // count
        if not count:
            yield Part(path), file.size
    elif PurePath(path).suffix in GROWTH:
        yield Part(path), int(file.size * GROWTH[PurePath(path).suffix])
    elif file.size <= nbytes or not may_be_cut(path):
        yield Part(path), file.size
    else:
        for start, stop in ranges(file.size, nbytes):
            yield Part(path, start, stop), stop - start


def rows_of(part: Part, names: Sequence[str], csv: Csv) -> Iterator[Rows]:
    """Yield the rows of a part with the columns `names`."""
    kind = format_of(part.path)
    if kind == "csv":
        yield from csv_rows(part, names, csv)
        return
    batches = _parquet_batches if kind == "parquet" else arrow_batches
    for batch, first in batches(part, names):
        yield Rows(batch, partial(add, first + 1))


def _parquet_batches(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    with open_parquet(part.path) as table:
        for batch, first in parquet_rows(table, part, names):
            yield _checked(batch, names), first


def arrow_batches(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yield each `pyarrow.RecordBatch` (a few MB) with the number of rows before it in the file."""
    with _arrow(part.path) as reader:
        first, count = 0, getattr(reader, "num_record_batches", None)
        batches = iter(reader) if count is None else iter(())  # a stream, or a file
        if count:
            first = sum(reader.get_batch(i).num_rows for i in range(part.start))
            batches = (reader.get_batch(i) for i in range(part.start, part.stop or count))
        for batch in batches:
            batch = _checked(batch, names)
            count = max(1, min(ROWS, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, count):
                yield batch.slice(start, count), first + start
            first += batch.num_rows


def _checked(batch: Any, names: Sequence[str]) -> Any:
    """Return some columns of a batch, validated: wrong lengths would crash the process later.

    Views become ordinary text and bytes: Arrow has no filter and no replacement of nulls for them.
    """
    import pyarrow as pa

    batch = batch.select(list(names))
    batch.validate(full=True)
    ordinary = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    if not any(plain(kind) in ordinary for kind in batch.schema.types):
        return batch
    columns = []
    for column in batch.columns:
        kind = ordinary.get(plain(column.type), plain(column.type))
        if pa.types.is_dictionary(column.type):
            kind = pa.dictionary(column.type.index_type, kind)
        columns.append(column.cast(kind))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


@contextmanager
def _arrow(path: str) -> Iterator[Any]:
    """Open an Arrow file (such as Feather) or an Arrow stream."""
    pa = pyarrow()
    SourceFile.of(path)
    try:
        with pa.memory_map(path) as file:
            whole = _is_arrow_file(path, file)
            with pa.ipc.open_file(file) if whole else pa.ipc.open_stream(file) as reader:
                if whole:
                    _check_first_schema(path, file, reader.schema)
                yield reader
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Arrow: {one_line(error)}") from None


def _is_arrow_file(path: str, file: Any) -> bool:
    """Return whether it is an Arrow file, which begins and ends with _MAGIC, or else a stream."""
    size = file.size()
    begins = file.read_at(min(size, len(_MAGIC)), 0) == _MAGIC
    ends = file.read_at(min(size, len(_MAGIC)), max(0, size - len(_MAGIC))) == _MAGIC
    if begins != ends:
        what = "end" if begins else "begin"
        raise DataError(
            f"{path} is damaged or incomplete: it does not {what} as an Arrow file does"
        )
    if file.read_at(min(size, 4), 0) == b"FEA1":
        raise DataError(
            f"{path} is of the first version of Feather: pyarrow.feather.read_table reads it, and "
            "write_feather writes the second"
        )
    return bool(begins)


def _check_first_schema(path: str, file: Any, schema: Any) -> None:
    """Compare the schema at the beginning of an Arrow file with that at its end, which is used."""
    import pyarrow as pa

    try:
        file.seek(8)  # _MAGIC is padded to 8 bytes
        first = pa.ipc.read_message(file)
        # Arrow has verified the message for its type only, and would read another as a schema:
        # its offsets may point out of the file, and the process would end.
        same = first.type == "schema" and bool(pa.ipc.read_schema(first).equals(schema))
    except (pa.ArrowException, OSError, EOFError):
        same = False
    if not same:
        raise DataError(f"{path} is damaged: its schema at the beginning is not that at the end")


def without(array: Any, rows: Iterable[int]) -> Any:
    """Return an array, or a batch, without some rows."""
    import pyarrow as pa

    which = list(rows)
    if not which:
        return array
    keep = np.ones(len(array), bool)
    keep[which] = False
    return array.filter(pa.array(keep))
