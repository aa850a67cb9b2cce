"""The command line's choice of columns: which ones become fields, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from data_prep.formats.tables import tables
from data_prep.formats.tables.columns import Column, plain
from data_prep.formats.tables.csv_files import Csv
from data_prep.source import SourceFile
from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few


class _Chosen(NamedTuple):
    """A column that becomes a field, or a part of one with --stack."""

    name: str
    target: str  # the name of the field
    cast: str  # the dtype that --cast gives for the column or for its stacked field, or ""


@dataclass(frozen=True)
class ColumnChoice:
    """The columns that become fields, and how; see the options of the same names."""

    columns: Sequence[str] = ()
    drop: Sequence[str] = ()
    categorical: Sequence[str] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    null: Mapping[str, str] = field(default_factory=dict)
    stack: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)

    def choose(self, names: Sequence[str]) -> list[_Chosen]:
        """Return those of these columns that become fields."""
        options = {
            "--columns": self.columns,
            "--drop": self.drop,
            "--categorical": self.categorical,
            "--null": self.null,
            "--rename": self.rename,
            "--cast": [name for name in self.cast if name not in self.stack],
        }
        there = frozenset(names)
        for option, given in options.items():
            for name in given:
                if name not in there:
                    raise ConfigError(f"{option} {name}: there is no such column; {_has(names)}")
        if self.columns and self.drop:
            raise ConfigError("--columns and --drop: give one of them")
        dropped = frozenset(self.drop)
        chosen = list(dict.fromkeys(self.columns)) or [n for n in names if n not in dropped]
        if not chosen:
            raise ConfigError("--drop leaves no column")
        stacked, first = self._stacked(chosen), dict[str, str]()
        found = []
        for name in chosen:
            target = stacked.get(name) or self.rename.get(name, name)
            other = first.setdefault(target, name)
            if other != name and not {name, other} <= stacked.keys():
                raise ConfigError(f"{other!r} and {name!r} would both be {target!r}")
            cast = self.cast.get(name) or (self.cast.get(target, "") if name in stacked else "")
            found.append(_Chosen(name, target, cast))
        return found

    def _stacked(self, names: Sequence[str]) -> dict[str, str]:
        """Return the field of each of these columns that is stacked."""
        stacked: dict[str, str] = {}
        for target, patterns in self.stack.items():
            for pattern in patterns:
                single = pattern in names and not set(pattern) & set("*?[")
                matching = (n for n in names if n == pattern or fnmatchcase(n, pattern))
                found = [pattern] if single else list(matching)
                if not found:
                    raise ConfigError(f"--stack {target}: no column is {pattern!r}; {_has(names)}")
                stacked |= dict.fromkeys(found, target)
        return stacked


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
            for batch, _ in tables.rows_of(part, names, csv):
                for name in names:
                    found[name].update(batch.column(name).unique().to_pylist())
    for name, values in found.items():
        if None in values:
            values.remove(None)
            if name in choice.null:  # the value that replaces nulls
                null = Column.of(name, schema.field(name).type, null=choice.null[name]).null
                values.add(null.as_py())
    return {name: sorted(values) for name, values in found.items()}


def _is_string(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
