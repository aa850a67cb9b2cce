"""What `python -m hpctrain --help NAME` says of keys: what the schema knows about them.

--help optimizer         the keys of a section
--help optimizer.lr      one key
--help warmup            the keys that have this word in their name or meaning
--help keys              every key
"""

import difflib
import json
import sys
from collections.abc import Sequence

from hpctrain.config.other_names import OTHER_NAMES
from hpctrain.config.schema import all_keys, all_members
from hpctrain.config.schema.key import REQUIRED, Member
from hpctrain.errors import ConfigError

COLUMNS = ("key", "type", "default", "unit", "allowed", "identity", "meaning")


def show(names: Sequence[str]) -> None:
    """Print the chosen keys: a table on a terminal, otherwise one line per key with tabs."""
    chosen = select([] if [*names] == ["keys"] else names)
    if sys.stdout.isatty():
        _print_table(chosen)
    else:
        for key in chosen:
            print("\t".join(row(key)))


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

    table = Table("key", "value", "default", "meaning")
    for key in chosen:
        title, kind, default, unit, allowed, identity, meaning = row(key)
        value = "\n".join(filter(None, (kind, unit, allowed)))
        texts = (title, value, default, f"{meaning} [identity]" if identity else meaning)
        table.add_row(*map(Text, texts))
    Console().print(table)
