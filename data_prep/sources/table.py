"""Tables as data sets: each column of CSV, Parquet or Arrow (Feather) files is a field.

SRC are files of one format, or folders with them (.csv, .tsv, also .gz; .parquet; .arrow,
.feather, .ipc), with the same columns.

    python -m data_prep table measurements/ OUT --columns id,x,y,label --categorical label
    python -m data_prep table digits.csv OUT --stack 'image=pixel_*' --cast image=uint8

ints, floats     as they are; uint64 as int64, where it fits
bool             uint8
dates, times     int64 in the unit of the column's type, which the provenance has
text, binary     variable-length uint8, UTF-8; or int32 codes with --categorical, the names in
                 the index, sorted; whole numbers keep the names that `export` gave them in Parquet
lists            fixed size: (n, k); others: variable-length
structs, maps    not possible: --drop them

Nulls cannot be used unless --null gives them a value; an integer that does not fit, or that a
float would round, cannot be used either (floats are rounded by a --cast to smaller ones). Such
rows are named by their number, from 1, the header not counted; --on-error says what then.

CSV has no types: those of the first MiB are taken for all rows. A number such as 007 is 7, and an
empty value (or NA, nan, null) of a number is null; --cast COLUMN=text takes the text as it is.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats import files, tables
from data_prep.formats.categories import categorical, names_of
from data_prep.formats.column_choice import ColumnChoice, listed, pairs
from data_prep.formats.columns import Column, plain, shown
from data_prep.formats.csv_files import Csv, Rows
from data_prep.formats.files import Part
from data_prep.formats.tables import without
from data_prep.options import Options, add_arguments
from data_prep.source import Block, Reading, Source
from data_prep.split import ByColumn
from hpctrain.data.field import Field
from hpctrain.data.sample_schema import ArrayBatch, check_fields
from hpctrain.errors import ConfigError, DataError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("sources", nargs="+", type=Path, metavar="SRC", help="files or folders")
    group = parser.add_argument_group("table")

    def several(option: str, metavar: str, text: str) -> None:
        group.add_argument(option, action="append", default=[], metavar=metavar, help=text)

    several("--columns", "NAME,…", "these only, in this order")
    several("--drop", "NAME,…", "all but these")
    several("--rename", "COLUMN=FIELD", "a field's name, where a column's is not possible")
    several("--categorical", "NAME,…", "int32 codes (reads these columns twice)")
    several("--cast", "NAME=DTYPE", "such as x=float32; of CSV also x=text")
    several("--null", "NAME=VALUE", "what stands for a null")
    several("--stack", "FIELD=NAME,…", "columns (also patterns) side by side as one field (n, k)")
    group.add_argument("--delimiter", default="", help="of CSV (default: a comma; .tsv: a tab)")
    group.add_argument("--header", metavar="NAME,…", help="of CSV that does not begin with one")
    group.add_argument("--no-quotes", action="store_true", help='of CSV: a " is like other letters')
    add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.convert import convert

    options = Options.of(args)
    if len(args.delimiter.encode()) > 1:
        raise ConfigError(f"--delimiter {args.delimiter!r}: it is one ASCII character")
    choice = ColumnChoice(
        columns=listed(args.columns),
        drop=listed(args.drop),
        rename=pairs("--rename", args.rename),
        categorical=listed(args.categorical),
        cast=pairs("--cast", args.cast),
        null=pairs("--null", args.null),
        stack={name: listed([text]) for name, text in pairs("--stack", args.stack).items()},
    )
    names = tuple(listed([args.header] if args.header else []))
    csv = Csv(args.delimiter, names, not args.no_quotes)
    convert(table(args.sources, choice, options, csv), args.out, options)


@dataclass(frozen=True)
class Table(Source):
    """See `table`."""

    fields_of: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    csv: Csv = field(default_factory=Csv)
    column: str = ""

    def read(self, what: Sequence[Part], reading: Reading) -> Iterator[Block]:
        """See `Source`."""
        columns = [column for group in self.fields_of.values() for column in group]
        names = list(dict.fromkeys([column.name for column in columns]))
        if self.column and self.column not in names:
            names.append(self.column)
        for part in what:
            for rows in tables.rows_of(part, names, self.csv):
                batch = self._usable(rows, columns, part.path, reading)
                if batch.num_rows:
                    yield self._block(batch, part.path)

    def _usable(self, rows: Rows, columns: Sequence[Column], path: str, reading: Reading) -> Any:
        """The rows that can be used; the others are told of in their order."""
        batch, bad = rows.batch, dict(rows.bad)
        if batch.num_rows:
            for column in columns:
                for row, why in column.problems(batch.column(column.name)).items():
                    bad.setdefault(row, why)
            if self.column:
                null = batch.column(self.column).is_null().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(null).tolist():
                    bad.setdefault(row, f"column {self.column!r} is null; --split goes by it")
        told = [*rows.missing, *((rows.number(row), why) for row, why in bad.items())]
        for number, why in sorted(told):
            reading.bad(path, f"row {number}", why)
        return without(batch, bad)

    def _block(self, batch: Any, path: str) -> Block:
        values: dict[str, Any] = {}
        for name, group in self.fields_of.items():
            arrays: list[Any] = [column.values(batch.column(column.name)) for column in group]
            values[name] = np.stack(arrays, axis=1) if self._stacked(name) else arrays[0]
        column = batch.column(self.column).to_pylist() if self.column else None
        rows: ArrayBatch = values
        return Block(rows, column=None if column is None else list(map(str, column)), file=path)

    def _stacked(self, name: str) -> bool:
        return self.fields[name].shape != self.fields_of[name][0].field.shape


def table(
    sources: Sequence[Path], choice: ColumnChoice, options: Options, csv: Csv | None = None
) -> Source:
    """A source of the rows of tables.

    Args:
        sources: Files or folders.
        choice: Which columns, and how.
        options: How much makes a piece, and the column that a split goes by.
        csv: How CSV is written.

    Raises:
        ConfigError: Options that the columns cannot meet.
        DataError: Files that cannot be read or have different columns, or a column of a type
            that no field holds.
    """
    found = files.find(sources, tables.PATTERNS)
    first, *others = (file.path for file in found.files)
    schema, csv = _schema(first, choice, csv or Csv())
    column = options.split.column if isinstance(options.split, ByColumn) else ""
    chosen = choice.choose(schema.names)
    outputs = choice.outputs(chosen)
    needed = [*chosen, *([column] if column in schema.names else [])]
    for path in others:
        _check_same(first, schema, path, csv, needed if choice.columns or choice.drop else None)
    categories = categorical(found.files, choice, csv, schema)
    fields_of = {
        target: [
            Column.of(
                name,
                schema.field(name).type,
                _cast(choice.cast_of(name, target)),
                choice.null.get(name),
                categories.get(name),
            )
            for name in names
        ]
        for target, names in outputs.items()
    }
    fields = {name: _field(name, group, name in choice.stack) for name, group in fields_of.items()}
    _check_names(fields)
    parts = (
        (part, file, size)
        for file in found.files
        for part, size in tables.parts_of(file, options.shard_bytes, csv)
    )
    return Table(
        name="table",
        fields=fields,
        pieces=files.pieces(parts, options.shard_bytes),
        identity={
            "columns": {target: [c.name for c in group] for target, group in fields_of.items()},
            "types": {name: str(schema.field(name).type) for name in needed},
            "cast": dict(choice.cast),
            "null": dict(choice.null),
            "categorical": {name: list(map(str, values)) for name, values in categories.items()},
            "csv": [csv.delimiter, csv.names, csv.quotes],
        },
        folders=[str(source) for source in sources],
        about={
            "from": [str(source.absolute()) for source in sources],
            "ignored": found.ignored,
            "types": {name: str(schema.field(name).type) for name in chosen},
        },
        categories={
            target: names
            for target, group in fields_of.items()
            if target not in choice.stack and (names := names_of(group[0], schema))
        },
        columns=schema.names,
        fields_of=fields_of,
        csv=csv,
        column=column,
    )


def _schema(path: str, choice: ColumnChoice, csv: Csv) -> tuple[Any, Csv]:
    """The schema of the first file, by which all are read."""
    import pyarrow as pa

    schema, first = tables.schema_of(path, csv)
    if tables.format_of(path) != "csv":
        if "text" in choice.cast.values():
            raise ConfigError(f"--cast …=text is for CSV; {path} has types of its own")
        return schema, csv
    chosen = choice.choose(schema.names)
    outputs = {name: target for target, names in choice.outputs(chosen).items() for name in names}
    types = {}
    for name, kind in zip(schema.names, schema.types, strict=True):
        cast = choice.cast_of(name, outputs.get(name, ""))
        kind = _csv_type(cast, kind)
        if pa.types.is_null(kind) or pa.types.is_binary(kind):
            why = "is not UTF-8" if pa.types.is_binary(kind) else "has no value in its first rows"
            if name in chosen:
                raise DataError(f"{path}: column {name!r} {why}; --cast gives it a type, --drop …")
            kind = pa.string()
        if pa.types.is_floating(kind) and not cast and name in chosen and first is not None:
            _check_large(path, name, first.column(name))
        types[name] = kind
    return pa.schema(list(types.items())), replace(csv, types=types)


def _csv_type(cast: str, kind: Any) -> Any:
    """How the values of a CSV column are read, so that a cast can follow."""
    import pyarrow as pa

    if cast == "text":
        return pa.string()
    if cast.startswith("float"):
        return pa.float64()
    if cast and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return pa.int64()
    return kind


def _check_large(path: str, name: str, values: Any) -> None:
    """Integers beyond int64 look like floats to Arrow, which would round them."""
    import pyarrow.compute as pc

    largest = pc.max(pc.abs(values)).as_py()
    if largest is None or largest < 2**63:
        return
    whole = pc.all(pc.equal(values, pc.floor(values))).as_py()
    if whole:
        raise DataError(
            f"{path}: column {name!r} has integers beyond int64, such as {shown(largest)}, which "
            f"a float would round; --cast {name}=float64 allows that, {name}=text keeps them"
        )


def _check_same(first: str, schema: Any, path: str, csv: Csv, needed: Sequence[str] | None) -> None:
    """See that a file has the columns of the first.

    Raises:
        DataError: It has not; with both.
    """
    if tables.format_of(path) != tables.format_of(first):
        raise DataError(f"{first} and {path} are of different formats; one at a time")
    other, _ = tables.schema_of(path, replace(csv, types={}))
    is_csv = tables.format_of(path) == "csv"
    if is_csv and other.names != schema.names:  # by place, not by name
        raise DataError(
            f"{path} has the columns {', '.join(other.names)}; {first} has "
            f"{', '.join(schema.names)}"
        )
    for name in needed or dict.fromkeys([*schema.names, *other.names]):
        kinds = [
            "no such column" if name not in s.names else str(plain(s.field(name).type))
            for s in (schema, other)
        ]
        if kinds[0] != kinds[1] and not is_csv:
            raise DataError(
                f"the files have different columns: {name!r} is {kinds[0]} in {first}, "
                f"{kinds[1]} in {path}"
            )


def _field(name: str, group: Sequence[Column], stack: bool) -> Field:
    """What a column, or the columns side by side, are stored as."""
    first = group[0].field
    if not stack:
        return first
    if first.variable:
        raise ConfigError(f"--stack {name}: {group[0].name!r} is {first}; it has no fixed size")
    for column in group:
        if column.field != first:
            raise ConfigError(
                f"--stack {name}: {group[0].name!r} is {first}, {column.name!r} is "
                f"{column.field}; they have to be of one fixed size and dtype, --cast {name}=DTYPE"
            )
    return Field(first.dtype, (len(group), *first.shape))


def _check_names(fields: Mapping[str, Field]) -> None:
    for name in fields:
        try:
            check_fields({name: fields[name]})
        except DataError as error:
            hint = "; is --delimiter right?" if set(name) & set(";|\t") else ""
            raise ConfigError(f"{error}; --rename {name!r}=NAME, or --drop it{hint}") from None


def _cast(cast: str) -> str:
    return "" if cast == "text" else cast
