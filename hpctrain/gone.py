"""What has left hpctrain: keys, choices, commands and options, with what takes their place.

gone.yaml has a line for each. The error of who still uses one is made from it, and the table of
docs/migrate.md. A frozen config of before is read without the keys that stand at their defaults.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain import yaml_file
from hpctrain.errors import ConfigError

log = logging.getLogger(__name__)
# No number of a run depends on these sections, and a site's file sets them for each run.
_OF_JOBS = ("launch.", "site.", "network.", "evaluation.")


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Return what has left by name, in the order of the file: `default` of a key, `instead`."""
    path = Path(__file__).with_name("gone.yaml")
    names: dict[str, dict[str, Any]] = yaml_file.parse(path.read_bytes(), str(path), {})
    return names


def sentence(name: str) -> str:
    """Return what takes the place of a key, a section, a choice or a command, or ""."""
    inner = [known for known in table() if known == name or known.startswith(f"{name}.")]
    instead = dict.fromkeys(str(table()[known]["instead"]) for known in inner)
    return f"{name} has left hpctrain: {' '.join(instead)}" if instead else ""


def check_command(program: str, argv: Sequence[str]) -> None:
    """Raise a ConfigError for a command, or an option of one, that has left the program."""
    command = f"{program} {argv[0] if argv else ''}"
    options = (f"{command} {word.partition('=')[0]}" for word in argv[1:] if word.startswith("-"))
    for name in (command, *options):
        if name in table():
            raise ConfigError(sentence(name))


def without_gone_keys(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of the frozen config `path` without the keys that have left.

    One that is not at its default decided something: a ConfigError names it. If it only says where
    and how jobs run, the run is read all the same, and the log names it.
    """
    left, known = dict(_left(values)), table()
    choices = {n: v for n, v in left.items() if f"{n}={v}" in known}
    set_then = {n: v for n, v in left.items() if n in choices or v != known[n]["default"]}
    said = {
        name: f"{path}: {name}={value}: {sentence(f'{name}={value}' if name in choices else name)}"
        for name, value in set_then.items()
    }
    wrong = [text for name, text in said.items() if not name.startswith(_OF_JOBS)]
    for text in said.values() if not wrong else ():
        log.warning("%s", text)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return _without(values, set(left)) if left else values


def _left(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if f"{prefix}{name}" in table() or f"{prefix}{name}={value}" in table():
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _left(value, f"{prefix}{name}.")


def _without(values: dict[str, Any], left: set[str], prefix: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and any(key.startswith(f"{path}.") for key in left):
            value = _without(value, left, f"{path}.")
            if not value:  # a section of which nothing is left
                continue
        if path not in left:
            kept[name] = value
    return kept
