"""`python -m hpctrain keys`: the sections of the config, and what the schema says about keys.

keys              the sections, each with its number of keys and its meaning
keys optimizer    the keys of a section; keys optimizer.lr: one key
keys warmup       the keys that have this word in their name or meaning
keys --all        every key
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence

from hpctrain.config.other_names import OTHER_NAMES
from hpctrain.config.schema import all_keys, all_members
from hpctrain.config.schema.key import REQUIRED, Member
from hpctrain.errors import ConfigError

COLUMNS = ("key", "type", "default", "unit", "allowed", "identity", "meaning")


def main(argv: list[str]) -> int:
    """Print the sections or the chosen keys; keys are a table on a terminal, otherwise lines."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain keys",
        description="Print the sections of the config, or the keys of the named sections with "
        "their type, default, unit, allowed values and meaning. A key with the mark `identity` "
        "decides the result: another value makes another run. Into a pipe or a file there is one "
        f"line per key, with tabs between {', '.join(COLUMNS)}.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="SECTION|KEY|WORD",
        help="a WORD is searched in the names and meanings of all keys; with several words a key "
        "must have each of them; the names that other tools have for a key find it, too",
    )
    parser.add_argument("--all", action="store_true", help="print every key")
    given = parser.parse_args(argv)
    if given.all and given.names:
        parser.error(f"--all prints every key: leave out {' '.join(given.names)}")
    if not given.all and not given.names:
        _print_sections()
        return 0
    chosen = select(given.names)
    if sys.stdout.isatty():
        _print_table(chosen)
    else:
        for key in chosen:
            print("\t".join(row(key)))
    return 0


def select(names: Sequence[str]) -> list[Member]:
    """Return the keys that have one of the names, are in a section of that name, or have the words.

    What is no name is a word: a key that has all of them, in its name or meaning, is chosen, too.
    If none has, a word may be the name that another tool has for a key; if none is, it is a
    ConfigError. Without any names all keys are chosen.
    """
    known = {member.name for member in all_members()}
    words = [name for name in names if name not in known]
    chosen = {name for name in names if name in known}
    found = {key.name for key in all_keys() if words and all(_has(key, word) for word in words)}
    if words and not found:
        found = {OTHER_NAMES.get(word, "") for word in words}
        if not found <= known:
            raise ConfigError(_unknown(words, sorted(known)))
    chosen |= found
    within = tuple(f"{name}." for name in chosen)
    return [
        key for key in all_keys() if not names or key.name in chosen or key.name.startswith(within)
    ]


def _has(key: Member, word: str) -> bool:
    """Return whether the key has the word, in which blanks, `_` and `-` are the same."""
    return _plain(word) in _plain(f"{key.name} {key.rule.text} {key.rule.allowed}")


def _plain(text: str) -> str:
    return text.lower().replace("_", " ").replace("-", " ")


def _unknown(words: Sequence[str], known: Sequence[str]) -> str:
    near = [OTHER_NAMES[word] for word in words if word in OTHER_NAMES]
    near = near or [n for word in words for n in difflib.get_close_matches(word, known, n=1)]
    hint = f"did you mean {' '.join(near)}? " if near else ""
    top = ", ".join(member.name for member in all_members() if "." not in member.name)
    return (
        f"{' '.join(words)}: no such key or section, and no key has "
        f"{'these words' if len(words) > 1 else 'this word'} in its meaning; {hint}the top level "
        f"has {top}"
    )


def _print_sections() -> None:
    from hpctrain.console import Cell, Console, Table

    top = [member for member in all_members() if "." not in member.name]
    sections, commands = Table("", "", "", right=(1,)), Table("", "")
    for member in (member for member in top if member.is_section):
        sections.add_row(member.name, str(len(select([member.name]))), member.rule.text)
    outside = ", ".join(member.name for member in top if not member.is_section)
    for arguments, meaning in (
        ("optimizer", "the keys of a section"),
        ("optimizer.lr", "one key"),
        ("warmup", "the keys with this word in name or meaning"),
        ("--all", f"all {len(all_keys())} keys"),
    ):
        commands.add_row(Cell(f"python -m hpctrain keys {arguments}", no_wrap=True), meaning)
    Console(highlight=False).print(
        sections, f"\nKeys outside of sections: {outside}\n", commands, sep="\n"
    )


def row(key: Member) -> tuple[str, ...]:
    """Return the texts of a key for `COLUMNS`."""
    if key.default == REQUIRED:
        default = "(required)"
    else:
        default = key.default if isinstance(key.default, str) else json.dumps(key.default)
    kind, identity = key.type.replace("None", "null"), "identity" if key.identity else ""
    return key.name, kind, default, key.rule.unit, key.rule.allowed, identity, key.rule.text


def _print_table(chosen: list[Member]) -> None:
    from rich.text import Text

    from hpctrain.console import Console, Table

    table = Table("key", "value", "default", "meaning", spaced=True)
    for key in chosen:
        title, kind, default, unit, allowed, identity, meaning = row(key)
        value = "\n".join(filter(None, (kind, unit, allowed)))
        texts = (title, value, default, f"{meaning} [identity]" if identity else meaning)
        table.add_row(*map(Text, texts))
    Console().print(table)
