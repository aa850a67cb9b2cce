"""What `python -m hpctrain --help NAME` says of keys, and of the metrics of a run.

--help optimizer         the keys of a section          --help perf/       a group of metrics
--help optimizer.lr      one key                        --help metrics     every metric
--help warmup            the keys that have this word in their name or meaning
--help keys              every key
"""

import difflib
import json
import re
import sys
from collections.abc import Sequence

from hpctrain.base.errors import ConfigError
from hpctrain.config.metric_registry import registered
from hpctrain.config.schema import all_keys, all_members
from hpctrain.config.schema.key import REQUIRED, Member

COLUMNS = ("key", "type", "default", "unit", "allowed", "identity", "meaning")


def show(names: Sequence[str]) -> None:
    """Print what is chosen: to be read on a terminal, otherwise one line each with tabs.

    In the names of metrics, words in capitals stand for what differs from run to run.
    """
    rows: list[tuple[str, ...]]
    if [*names] == ["metrics"] or all("/" in name for name in names):
        rows = [*registered()]
        groups = {f"{row[0].partition('/')[0]}/" for row in rows}
    else:
        rows = [row_of(key) for key in all_keys()]
        groups = {member.name for member in all_members() if member.is_section}
    chosen = _select(rows, groups, [] if [*names] in (["keys"], ["metrics"]) else names)
    if sys.stdout.isatty():
        _print_entries(chosen)
    else:
        print("\n".join("\t".join(row) for row in chosen))


def _select(
    rows: Sequence[tuple[str, ...]], groups: set[str], names: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the rows that have one of the names, are in a group of that name, or have the words.

    What is no name is a word: a row that has all of them is chosen, too. If none has, a word may be
    the name that another tool has for a key; if none is, it is a ConfigError. Without any names all
    rows are chosen.
    """
    known = groups | {row[0] for row in rows}
    words = [name for name in names if name not in known]
    chosen = {name for name in names if name in known}
    found = {row[0] for row in rows if words and all(_has(row, word) for word in words)}
    if words and not found:
        from hpctrain.config.explain import OTHER_NAMES  # with omegaconf

        found = {OTHER_NAMES.get(word, "") for word in words}
        if not found <= known:
            raise ConfigError(_unknown(words, sorted(known)))
    chosen |= found
    within = tuple(name if name.endswith("/") else f"{name}." for name in chosen)
    return [row for row in rows if not names or row[0] in chosen or row[0].startswith(within)]


def _has(row: tuple[str, ...], word: str) -> bool:
    """Return whether a word of the row begins so; blanks, `_` and `-` are the same."""
    return re.search(rf"(?<!\w){re.escape(_plain(word))}", _plain(" ".join(row))) is not None


def _plain(text: str) -> str:
    return text.lower().replace("_", " ").replace("-", " ")


def _unknown(words: Sequence[str], known: Sequence[str]) -> str:
    from hpctrain.config.explain import OTHER_NAMES

    near = [OTHER_NAMES[word] for word in words if word in OTHER_NAMES]
    near = near or [n for word in words for n in difflib.get_close_matches(word, known, n=1)]
    hint = f"did you mean {' '.join(near)}? " if near else ""
    top = ", ".join(name for name in known if name.endswith("/") or not {".", "/"} & {*name})
    return (
        f"{' '.join(words)}: there is none of this name, and none has "
        f"{'these words' if len(words) > 1 else 'this word'} in its meaning; {hint}at the top are "
        f"{top}"
    )


def row_of(key: Member) -> tuple[str, ...]:
    """Return the texts of a key for `COLUMNS`."""
    if key.default == REQUIRED:
        default = "(required)"
    else:
        default = key.default if isinstance(key.default, str) else json.dumps(key.default)
    kind, identity = key.type.replace("None", "null"), "identity" if key.identity else ""
    return key.name, kind, default, key.rule.unit, key.rule.allowed, identity, key.rule.text


def _print_entries(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a line of facts for each row, and its meaning below it, as wide as the terminal."""
    from rich.text import Text

    from hpctrain.base.terminal.console import Console, wrapped

    console = Console()
    for name, *facts, meaning in rows:
        if len(rows[0]) == len(COLUMNS):
            kind, default, unit, allowed, identity = facts
            part = "part of the run's name" if identity else ""
            name, facts = f"{name}={default}", [*filter(None, (kind, unit, allowed, part))]
        head = Text.assemble((name, "bold"), "  ", "; ".join(facts))
        first, *rest = wrapped(head, console.width - 4)
        console.print(first)
        for line in (*rest, *wrapped(Text(meaning), console.width - 4)):
            console.print(Text("    ") + line)
