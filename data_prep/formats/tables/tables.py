"""Tables in CSV and Parquet files: their schema, their parts, and their rows.

A CSV file is a single part, because a line may be only a part of a row.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from data_prep.formats.files import FileRange
from data_prep.formats.opening import GROWTH, OTHERS, kind_of, open_parquet, parquet_rows
from data_prep.formats.tables.columns import plain
from data_prep.formats.tables.csv_files import Csv, csv_rows, csv_schema
from data_prep.source import SourceFile
from hpctrain.base.errors import ConfigError, DataError

_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
PATTERNS = ("*.csv", "*.csv.gz", "*.tsv", "*.tsv.gz", "*.parquet")


def format_of(path: str) -> str:
    """Return the format of a file by its ending: "csv" or "parquet"."""
    kind, packing = kind_of(path, _SUFFIXES)
    if not kind or (packing and kind != "csv"):
        raise ConfigError(f"{path}: table reads {', '.join(PATTERNS)}; for others, {OTHERS}")
    return kind


def schema_of(path: str, csv: Csv) -> Any:
    """Return a file's `pyarrow.Schema`."""
    if format_of(path) == "csv":
        schema = csv_schema(path, csv)
    else:
        with open_parquet(path) as table:
            schema = table.schema_arrow
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        more = f", and {len(twice) - 1} other names twice" if len(twice) > 1 else ""
        raise DataError(f"{path} has more than one column {min(twice)!r}{more}")
    return schema


def parts_of(file: SourceFile) -> Iterator[tuple[FileRange, int]]:
    """Cut a file into parts; yield each with the approximate bytes of its data."""
    path = file.path
    if format_of(path) == "parquet":
        with open_parquet(path) as table:
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).total_byte_size
                yield FileRange(path, group, group + 1), size
    else:
        yield FileRange(path), int(file.size * GROWTH.get(PurePath(path).suffix, 1))


def rows_of(part: FileRange, names: Sequence[str], csv: Csv) -> Iterator[tuple[Any, int]]:
    """Yield batches of the columns `names`, each with the number in the file of its first row."""
    if format_of(part.path) == "csv":
        yield from csv_rows(part.path, names, csv)
        return
    with open_parquet(part.path) as table:
        for batch, first in parquet_rows(table, part, names):
            yield checked(batch, names), first + 1


def checked(batch: Any, names: Sequence[str]) -> Any:
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
