"""`python -m hpctrain keys [SECTION|KEY...]`: print what the schema says about each config key."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence

from hpctrain.config.schema import Config
from hpctrain.config.schema.key import REQUIRED, Member, keys, members
from hpctrain.errors import ConfigError

COLUMNS = ("key", "type", "default", "unit", "allowed", "identity", "meaning")


def main(argv: list[str]) -> int:
    """Print the named keys, or all of them: as a table on a terminal, otherwise line by line."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain keys",
        description="Print every config key with its type, default, unit, allowed values and "
        "meaning. A key with the mark `identity` decides the result: another value makes another "
        "run. Into a pipe or a file there is one line per key, with tabs between "
        f"{', '.join(COLUMNS)}.",
    )
    parser.add_argument("names", nargs="*", metavar="SECTION|KEY", help="none: all keys")
    chosen = select(parser.parse_args(argv).names)
    if sys.stdout.isatty():
        _print_table(chosen)
    else:
        for key in chosen:
            print("\t".join(row(key)))
    return 0


def select(names: Sequence[str]) -> list[Member]:
    """Return the keys that have one of the names, or are in a section of that name.

    Raises:
        ConfigError: There is no key or section of a name.
    """
    known = [member.name for member in members(Config)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            top = ", ".join(member for member in known if "." not in member)
            raise ConfigError(f"{name}: no such key or section; {hint}the top level has {top}")
    within = tuple(f"{name}." for name in names)
    return [
        key for key in keys(Config) if not names or key.name in names or key.name.startswith(within)
    ]


def row(key: Member) -> tuple[str, ...]:
    """Return the texts of a key for `COLUMNS`."""
    if key.default == REQUIRED:
        default = "(required)"
    else:
        default = key.default if isinstance(key.default, str) else json.dumps(key.default)
    kind, identity = key.type.replace("None", "null"), "identity" if key.identity else ""
    return key.name, kind, default, key.rule.unit, key.rule.allowed, identity, key.rule.text


def _print_table(chosen: list[Member]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from hpctrain.console import Console

    name = Column("key", no_wrap=True)
    table = Table(name, "value", "default", Column("meaning", ratio=1), show_lines=True)
    for key in chosen:
        title, kind, default, unit, allowed, identity, meaning = row(key)
        value = "\n".join(filter(None, (kind, unit, allowed)))
        texts = (title, value, default, f"{meaning} [identity]" if identity else meaning)
        table.add_row(*map(Text, texts))
    Console().print(table)
