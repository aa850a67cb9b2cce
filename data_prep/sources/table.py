"""Tables as data sets: each column of CSV or Parquet files is a field.

SRC are files with the same columns, or folders with such files (.csv, .tsv, also .gz; .parquet).
Each CSV file is read by one process: it is a piece of the work.

    python -m data_prep table measurements/ OUT --columns id,x,y,label --categorical label
    python -m data_prep table digits.csv OUT --stack 'image=pixel_*' --cast image=uint8

ints, floats     the same dtype; uint64 is stored as int64 if all values fit
bool             uint8
dates, times     int64 in the unit of the column's type, which is in the provenance
text, binary     variable-length uint8 (text as UTF-8); with --categorical int32 codes of the
                 sorted values, whose names are in the index
lists            fixed-size lists: (n, k); other lists: variable-length
structs, others  cannot be stored (nor decimals): use --drop

A row cannot be used if it has a null and --null gives no value for it, or an integer that does not
fit or that a float would round (--cast may round floats to a smaller float). Messages give the
number of such a row, from 1, without the header. --on-error says what happens then.

CSV has no types: the values in the first 4 MiB decide the types for all rows. A later value of
another type, or a row with too few or too many, is refused, whatever --on-error says. In a column
of numbers, 007 is 7, and an empty value (or NA, nan, null) is null. --cast COLUMN=text keeps the
text, and --cast COLUMN=float64 allows that integers are rounded. CSV is UTF-8.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from data_prep.formats import files
from data_prep.formats.files import FileRange
from data_prep.formats.opening import naming, one_line, pyarrow
from data_prep.formats.tables import tables
from data_prep.formats.tables.column_choice import ColumnChoice, categorical, listed
from data_prep.formats.tables.columns import Column, plain
from data_prep.formats.tables.csv_files import Csv
from data_prep.options import Options, pairs, writing
from data_prep.source import BadRecords, InputSource, SampleBlock
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import Field

ARGUMENTS = f"""
sources=SRC+ : path
    files or folders
[table]
--columns NAME,… ...
    take only these columns, in this order
--drop NAME,… ...
    take all columns except these
--categorical NAME,… ...
    store int32 codes; reads these columns twice
--cast NAME=DTYPE ...
    the dtype to store, such as x=float32; for CSV also x=text
--null NAME=VALUE ...
    the value that replaces nulls
--rename NAME=FIELD ...
    another name for the field of a column
--stack FIELD=NAME,… ...
    store several columns (or patterns) as one field (n, k)
--delimiter DELIMITER =
    CSV: what separates values (default: a comma; .tsv: a tab)
--header NAME,…
    CSV: the column names, if the first line has none
{files.OUTSIDE}
{writing()}
"""


@dataclass(frozen=True)
class _TableSource(InputSource):
    """See the module."""

    fields_of: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    csv: Csv = field(default_factory=Csv)
    column: str = ""

    def read(self, what: Sequence[FileRange], reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        columns = [column for group in self.fields_of.values() for column in group]
        names = list(dict.fromkeys([column.name for column in columns]))
        if self.column and self.column not in names:
            names.append(self.column)
        arrow = pyarrow()
        for part in what:
            try:
                for batch, first in tables.rows_of(part, names, self.csv):
                    yield from self._blocks(batch, first, columns, part.path, reading)
            except arrow.ArrowException as error:
                raise DataError(f"{part.path} cannot be converted: {one_line(error)}") from None

    def _blocks(
        self, batch: Any, first: int, columns: Sequence[Column], path: str, reading: BadRecords
    ) -> Iterator[SampleBlock]:
        """Yield the rows of a batch that can be used; report the others in their order."""
        bad: dict[int, str] = {}
        for column in columns if batch.num_rows else ():
            bad = column.problems(batch.column(column.name)) | bad
        if self.column and batch.num_rows:
            null = batch.column(self.column).is_null().to_numpy(zero_copy_only=False)
            why = f"column {self.column!r} is null; --split or --group goes by it"
            bad = dict.fromkeys(np.flatnonzero(null).tolist(), why) | bad
        for row, why in sorted(bad.items()):
            reading.bad(path, f"row {first + row}", why)
        if len(bad) == batch.num_rows:
            return
        kept = np.delete(np.arange(batch.num_rows), list(bad))
        good, values = batch.take(kept) if bad else batch, dict[str, Any]()
        for name, group in self.fields_of.items():
            arrays: list[Any] = [column.values(good.column(column.name)) for column in group]
            stacked = self.fields[name].shape != group[0].field.shape
            values[name] = np.stack(arrays, axis=1) if stacked else arrays[0]
        texts = None
        if self.column:
            texts = [*map(str, batch.column(self.column).take(kept).to_pylist())]
        yield SampleBlock(
            values,
            column=texts,
            file=path,
            records=lambda sample: f"row {first + int(kept[sample])}",
        )


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the rows of tables."""
    if len(args.delimiter.encode()) > 1:
        raise ConfigError(f"--delimiter {args.delimiter!r}: it is one ASCII character")
    choice = ColumnChoice(
        columns=listed(args.columns),
        drop=listed(args.drop),
        categorical=listed(args.categorical),
        cast=pairs("--cast", args.cast),
        null=pairs("--null", args.null, empty=True),
        rename=pairs("--rename", args.rename, "NAME=FIELD"),
        stack={name: listed([text]) for name, text in pairs("--stack", args.stack).items()},
    )
    csv = Csv(delimiter=args.delimiter, names=tuple(listed([args.header or ""])))
    found = files.find(args.sources, tables.PATTERNS, args.allow_outside)
    first, *others = paths = [file.path for file in found.files]
    with naming(paths):
        schema, csv = _schema(first, choice, csv)
        column = options.column if options.column in schema.names else ""
        chosen = choice.choose(schema.names)
        needed = [*(each.name for each in chosen), *([column] if column else [])]
        for path in others:
            some = needed if choice.columns or choice.drop else None
            _check_same(first, schema, path, csv, some)
        categories = categorical(found.files, choice, csv, schema)
        fields_of: dict[str, list[Column]] = {}
        for name, target, cast in chosen:
            kind, cast = schema.field(name).type, "" if cast == "text" else cast
            made = Column.of(name, kind, cast, choice.null.get(name), categories.get(name))
            fields_of.setdefault(target, []).append(made)
        fields = {
            name: _field(name, group, name in choice.stack) for name, group in fields_of.items()
        }
        for name in fields:
            if set(name) & set(";|\t"):
                raise ConfigError(f"there is a column {name!r}: is --delimiter right?")
    parts = ((part, file, size) for file in found.files for part, size in tables.parts_of(file))
    return _TableSource(
        name="table",
        fields=fields,
        pieces=files.pieces(parts, options.shard_bytes),
        identity={
            "columns": {target: [c.name for c in group] for target, group in fields_of.items()},
            "types": {name: str(schema.field(name).type) for name in needed},
            "cast": dict(choice.cast),
            "null": dict(choice.null),
            "categorical": {name: list(map(str, values)) for name, values in categories.items()},
            "csv": [csv.delimiter, csv.names],
        },
        folders=[str(source) for source in args.sources],
        about={
            "from": [str(source.absolute()) for source in args.sources],
            "ignored": found.ignored,
            "types": {each.name: str(schema.field(each.name).type) for each in chosen},
        },
        categories={
            target: list(map(str, group[0].categories))
            for target, group in fields_of.items()
            if target not in choice.stack and group[0].categories is not None
        },
        columns=schema.names,
        fields_of=fields_of,
        csv=csv,
        column=column,
    )


def _schema(path: str, choice: ColumnChoice, csv: Csv) -> tuple[Any, Csv]:
    """Return the schema of the first file, which is used for all files."""
    import pyarrow as pa

    if tables.format_of(path) != "csv":
        if "text" in choice.cast.values():
            raise ConfigError(f"--cast …=text is for CSV; {path} has types of its own")
        return tables.schema_of(path, csv), csv
    schema = tables.schema_of(path, csv)
    chosen = {each.name: each.cast for each in choice.choose(schema.names)}
    types, exact = {}, set()
    for name, kind in zip(schema.names, schema.types, strict=True):
        cast = chosen.get(name) or choice.cast.get(name, "")
        kind = _csv_type(cast, kind)
        if pa.types.is_null(kind):
            if name in chosen:
                raise DataError(
                    f"{path}: column {name!r} has no value in the first rows that have "
                    f"{len(schema)}, as the header; --cast {name}=DTYPE gives it a type, --drop "
                    "leaves it out"
                )
            kind = pa.string()
        if pa.types.is_floating(kind) and not cast.startswith("float"):
            exact.add(name)
        types[name] = kind
    return pa.schema(list(types.items())), replace(csv, types=types, exact=frozenset(exact))


def _csv_type(cast: str, kind: Any) -> Any:
    """Return the type as which a CSV column is read, so that it can be cast later."""
    import pyarrow as pa

    if cast == "text":
        return pa.string()
    if cast.startswith("float"):
        return pa.float64()
    if cast and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return pa.int64()
    return kind


def _check_same(first: str, schema: Any, path: str, csv: Csv, needed: Sequence[str] | None) -> None:
    """Check that a file has the columns of the first file."""
    if tables.format_of(path) != tables.format_of(first):
        raise DataError(f"{first} and {path} are of different formats; one at a time")
    other = tables.schema_of(path, replace(csv, types={}))
    is_csv = tables.format_of(path) == "csv"
    if is_csv and other.names != schema.names:  # the order matters too: CSV is read by position
        raise DataError(
            f"{path} has the columns {', '.join(other.names)}; {first} has "
            f"{', '.join(schema.names)}"
        )
    types = [dict(zip(s.names, s.types, strict=True)) for s in (schema, other)]
    for name in () if is_csv else needed or types[0] | types[1]:
        kinds = [str(plain(t[name])) if name in t else "no such column" for t in types]
        if kinds[0] != kinds[1]:
            raise DataError(
                f"the files have different columns: {name!r} is {kinds[0]} in {first}, "
                f"{kinds[1]} in {path}"
            )


def _field(name: str, group: Sequence[Column], stack: bool) -> Field:
    """Return the field that stores a column, or several columns that are stacked."""
    first, named = group[0].field, f"--stack {name}: {group[0].name!r} is {group[0].field}"
    if not stack:
        return first
    if first.variable:
        raise ConfigError(f"{named}; it has no fixed size")
    for column in group:
        if column.field != first:
            raise ConfigError(
                f"{named}, {column.name!r} is {column.field}; they have to be of one fixed size "
                f"and dtype, --cast {name}=DTYPE"
            )
    return Field(first.dtype, (len(group), *first.shape))
