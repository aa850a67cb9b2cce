"""The config of another program, from which one key after the other is taken.

    source = Source("ds.json", content, {"wall_clock_breakdown": "..."})
    source.take("zero_optimization.stage", 0)     # 3
    source.left()                                 # what was not taken, with the reason

A key that is neither taken nor in the table of reasons is left, too: releases add keys, and people
keep their own beside them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.errors import ConfigError

_AUTO = "auto"


class Source:
    """The keys of a config file, by their dotted names; errors name the file.

    `reasons` say for each key or whole section without a counterpart why it has none.
    """

    def __init__(self, file: str, content: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        self.file, self._reasons = file, reasons
        self._values = dict(_leaves(content))
        self._known: set[str] = set()
        self._dropped: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether the file has the key, or keys of this section."""
        return name in self._values or any(key.startswith(f"{name}.") for key in self._values)

    def take(self, name: str, default: Any = None, ours: str = "") -> Any:
        """Return the value of a key; `default` if it is missing, null or "auto"."""
        self._known.add(name)
        value = self._values.get(name)
        if value == _AUTO and name not in self._dropped:
            self.drop(name, f"{_FILLED_IN}: set {ours}" if ours else _FILLED_IN)
        return default if value in (None, _AUTO) else value

    def is_auto(self, name: str) -> bool:
        """Return whether the value of a key is "auto"."""
        return bool(self._values.get(name) == _AUTO)

    def number(self, name: str, default: Any = None, ours: str = "") -> Any:
        """Return the value of a key that must be a number."""
        value = self.take(name, default, ours)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.file}: {name}={shown(value)}: it must be a number")
        return value

    def choice(self, name: str, allowed: Mapping[Any, Any], default: Any = None) -> Any:
        """Return what `allowed` has for the value of a key; texts are compared in lower case."""
        given = self.take(name, default)
        value = given.lower() if isinstance(given, str) else given
        if isinstance(value, dict | list) or (value is not None and value not in allowed):
            listed = ", ".join(str(one) for one in allowed)
            listed = listed.upper() if shown(given).isupper() else listed
            raise ConfigError(f"{self.file}: {name}={shown(given)}: allowed are {listed}")
        return None if value is None else allowed[value]

    def drop(self, name: str, reason: str = "") -> None:
        """Record why a key that was taken has no counterpart after all, if the file has it."""
        self._known.add(name)
        if name in self._values:
            self._dropped[name] = reason or self._reasons[name].removeprefix(ALWAYS)

    def left(self) -> dict[str, str]:
        """Return `KEY=VALUE` of what has no counterpart, each with the reason.

        If all keys are unknown, the file belongs to something else, which is a ConfigError.
        """
        left, unknown = {}, []
        for name, value in self._values.items():
            section = next((part for part in _prefixes(name) if part in self._reasons), None)
            if name in self._dropped:
                left[f"{name}={shown(value)}"] = self._dropped[name]
            elif name in self._known or (value in ({}, None) and self._is_section(name)):
                continue
            elif section is None:
                unknown.append(name)
            elif section != name:
                off = self._values.get(f"{section}.enabled") is False
                left[section] = _OFF if off else self._reasons[section].removeprefix(ALWAYS)
            else:
                off = value in (False, None, "none")
                reason = self._reasons[section]
                always = reason.startswith(ALWAYS)
                shorter = reason.removeprefix(ALWAYS)
                left[f"{name}={shown(value)}"] = _OFF if off and not always else shorter
        if unknown and len(unknown) == len(self._values):
            raise ConfigError(
                "\n".join(f"{self.file}: {name}: {self._unknown(name)}" for name in unknown)
            )
        return left | {f"{n}={shown(self._values[n])}": self._unknown(n) for n in unknown}

    def _is_section(self, name: str) -> bool:
        return any(key.startswith(f"{name}.") for key in (*self._known, *self._reasons))

    def _unknown(self, name: str) -> str:
        known = [*self._known, *self._reasons]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        last = {key.rpartition(".")[2]: key for key in known}
        inner = difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.8)
        guess = near or [last[key] for key in inner]
        hint = f": did you mean {guess[0]}?" if guess else ""
        return f"there is no such key{hint}"


# A reason that begins with this holds for `false`, too.
ALWAYS = "!"
_FILLED_IN = "the Hugging Face Trainer fills it in"
_OFF = "it is off, and so it is here"


def shown(value: Any) -> str:
    """Return a value as it stands in the file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
