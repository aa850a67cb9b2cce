"""What has left hpctrain: keys, choices, commands and options, with what takes their place.

gone.yaml has a line for each. The error of who still uses one is made from it, and the table of
docs/migrate.md. A frozen config of before is read without the keys that stand at their defaults.
"""

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file

log = logging.getLogger(__name__)
# No number of a run depends on these sections and keys, and a site's file sets most for each run.
_OF_JOBS = (
    *("launch.", "site.", "network.", "evaluation.", "hardware.", "notify."),
    *("data.stage.", "data.verify."),
)


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
    given = [word.partition("=")[0] for word in argv[1:] if word.startswith("-")]
    for name in (command, *(f"{each} {word}" for word in given for each in (command, program))):
        if name in table():
            raise ConfigError(sentence(name))


def without_gone_keys(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Take the keys that have left out of the values of the frozen config `path`, and return these.

    One that is not at its default decided something: a ConfigError names it. If it only says where
    and how jobs run, the run is read all the same, and the log names it.
    """
    said: dict[str, str] = {}
    for name, left in table().items():
        key, _, choice = name.partition("=")
        if " " in name or not (choice or "default" in left):  # of a command, or of a file of conf
            continue
        *sections, last = key.split(".")
        above: list[dict[str, Any]] = [values]
        for section in sections:
            inner = above[-1].get(section)
            above.append(inner if isinstance(inner, dict) else {})
        if last not in above[-1] or (choice and str(above[-1][last]) != choice):
            continue
        value = above[-1].pop(last)
        if choice or value != left["default"]:
            said[key] = f"{path}: {key}={value}: {sentence(name)}"
        for section, outer in zip(reversed(sections), reversed(above[:-1]), strict=True):
            if not outer[section]:  # a section of which nothing is left
                del outer[section]
    wrong = [text for name, text in said.items() if not f"{name}.".startswith(_OF_JOBS)]
    for text in said.values() if not wrong else ():
        log.warning("%s", text)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return values
