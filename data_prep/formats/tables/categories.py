"""Category names of a column: found in the data (--categorical) or in a Parquet file's metadata."""

import json
from collections.abc import Sequence
from typing import Any

from data_prep.formats.tables import tables
from data_prep.formats.tables.column_choice import ColumnChoice
from data_prep.formats.tables.columns import Column, plain
from data_prep.formats.tables.csv_files import Csv
from data_prep.formats.tables.tables import without
from data_prep.source import SourceFile
from hpctrain.errors import ConfigError, DataError

_MAX_CATEGORIES = 1_000_000
NAMES = b"categories"  # key in a column's metadata, with a JSON list; `export` writes it


def categorical(
    sources: Sequence[SourceFile], choice: ColumnChoice, csv: Csv, schema: Any
) -> dict[str, list[Any]]:
    """Return the sorted values of each column in --categorical."""
    import pyarrow.types as types

    names = list(dict.fromkeys(choice.categorical))
    for name in names:
        kind = plain(schema.field(name).type)
        if not (types.is_integer(kind) or types.is_boolean(kind) or _is_string(kind)):
            raise ConfigError(f"--categorical {name}: it is {kind}, not text or whole numbers")
        if name in choice.cast and choice.cast[name] != "text":
            raise ConfigError(f"--categorical {name}: its codes are int32, there is no --cast")
    found: dict[str, set[Any]] = {name: set() for name in names}
    for file in sources if names else ():
        for part, _ in tables.parts_of(file, file.size or 1, csv):
            for rows in tables.rows_of(part, names, csv):
                for name in names if rows.batch.num_rows else ():
                    values = without(rows.batch.column(name), rows.bad)
                    found[name].update(values.unique().to_pylist())
                    if len(found[name]) > _MAX_CATEGORIES:
                        raise DataError(
                            f"{file.path}: --categorical {name}: it has more than "
                            f"{_MAX_CATEGORIES:,} different values"
                        )
    for name, values in found.items():
        if None in values:
            values.remove(None)
            if name in choice.null:  # the value that replaces nulls
                null = Column.of(name, schema.field(name).type, null=choice.null[name]).null
                values.add(null.as_py())
    return {name: sorted(values) for name, values in found.items()}


def names_of(column: Column, schema: Any) -> list[str]:
    """Return the names of a field's values 0, 1, …: its categories, or those in the metadata."""
    if column.categories is not None:
        return list(map(str, column.categories))
    if column.field.variable or column.field.shape or "int" not in column.field.dtype:
        return []
    metadata = schema.field(column.name).metadata or {}
    try:
        names = json.loads(metadata.get(NAMES, b"[]"))
    except ValueError:
        return []
    return names if isinstance(names, list) and all(isinstance(n, str) for n in names) else []


def _is_string(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
