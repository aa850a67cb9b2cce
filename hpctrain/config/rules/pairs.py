"""Keys that do not go together: pairs.yaml has a row for each pair, and here its error is made.

launch.spares, launch.nodes~-, a job with spares has one number of nodes
    launch.spares=1 with launch.nodes=1-2: a job with spares has one number of nodes
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.files import yaml_file
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, all_keys

_FREE = ("model.", "task.")


class _Condition(NamedTuple):
    """What must hold for one key; pairs.yaml explains the signs."""

    sign: str
    key: str
    values: list[str]
    default: Any

    @classmethod
    def of(cls, text: str) -> "_Condition":
        sign, key, values = "!", text[1:], ""
        if not text.startswith("!"):
            key, sign, values = re.fullmatch(r"([\w.]+)(!?=|~|)(.*)", text).groups()  # type: ignore[union-attr]
        known = {each.name: each.default for each in all_keys()}
        default = None if key.startswith(_FREE) else known[key]
        return cls(sign, key, values.split("|"), default)

    def met(self, config: Config) -> str:
        """Return the key with its value, for an error, or "" if the condition is not met."""
        section, _, name = self.key.partition(".")
        free = self.key.startswith(_FREE)
        value = getattr(config, section).get(name) if free else attrgetter(self.key)(config)
        text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        match self.sign:
            case "":
                holds = value != self.default
            case "~" if isinstance(value, dict):
                return f"{self.key}.{self.values[0]}" if self.values[0] in value else ""
            case "~":
                holds = isinstance(value, str | list) and self.values[0] in value
            case "!":
                return "" if value and value != self.default else f"needs {self.key}"
            case _:
                holds = (text in self.values) == (self.sign == "=")
        return f"{self.key}={text}" if holds else ""


_Side = list[list[_Condition]]  # of the alternatives, each a list of what must hold


def refused(config: Config, kind: str, degrees: Degrees | None = None) -> Iterator[str]:
    """Yield the error of each row of a kind that a config meets, with these degrees if given."""
    config = _with(config, degrees)
    for first, second, why in _rows()[kind]:
        for one in _met(config, first):
            for other in _met(config, second):
                pair = f"{one} {'' if other.startswith('needs ') else 'with '}{other}"
                yield f"{pair}: {why}" if why else pair


def meets(config: Config, side: str, degrees: Degrees) -> bool:
    """Return whether a config with these degrees meets what a side of a row would say."""
    return any(_met(_with(config, degrees), _side(side)))


def _with(config: Config, degrees: Degrees | None) -> Config:
    if degrees is None:
        return config
    return replace(config, parallel=replace(config.parallel, **vars(degrees)))


def _met(config: Config, side: _Side) -> Iterator[str]:
    for conditions in side:
        met = list[str]()
        for condition in conditions:
            if not (text := condition.met(config)):
                break
            met.append(text)
        else:
            yield " and ".join(met)


@functools.cache
def _rows() -> dict[str, list[tuple[_Side, _Side, str]]]:
    table = yaml_file.read(Path(__file__).with_name("pairs.yaml"))
    return {
        kind: [(_side(first), _side(second), why) for first, second, why in rows]
        for kind, rows in table.items()
    }


def _side(text: str) -> _Side:
    return [[_Condition.of(one) for one in part.split()] for part in text.split(", ")]
