"""The command line's choice of columns: which ones become fields, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_prep.formats.tables import tables
from data_prep.formats.tables.columns import plain
from data_prep.formats.tables.csv_files import Csv
from data_prep.source import SourceFile
from hpctrain.base.terminal.terminal import few
from hpctrain.errors import ConfigError


@dataclass(frozen=True)
class ColumnChoice:
    """The columns that become fields, and how; see the options of the same names."""

    columns: Sequence[str] = ()
    categorical: Sequence[str] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return those of these columns that become fields."""
        there = frozenset(names)
        for option in ("columns", "categorical", "rename", "cast"):
            for name in getattr(self, option):
                if name not in there:
                    raise ConfigError(f"--{option} {name}: there is no such column; {_has(names)}")
        return list(dict.fromkeys(self.columns)) or list(names)

    def outputs(self, names: Sequence[str]) -> dict[str, str]:
        """Return the column of each field."""
        outputs: dict[str, str] = {}
        for name in names:
            target = self.rename.get(name, name)
            if target in outputs:
                raise ConfigError(f"{outputs[target]!r} and {name!r} would both be {target!r}")
            outputs[target] = name
        return outputs


def listed(given: Sequence[str]) -> list[str]:
    """Return the names of a repeatable option whose values are lists such as NAME,NAME."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def _has(names: Sequence[str]) -> str:
    return f"there are {few(names, 30)}"


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
        for part, _ in tables.parts_of(file):
            for rows in tables.rows_of(part, names, csv):
                for name in names:
                    found[name].update(rows.batch.column(name).unique().to_pylist())
    for values in found.values():
        values.discard(None)
    return {name: sorted(values) for name, values in found.items()}


def _is_string(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
