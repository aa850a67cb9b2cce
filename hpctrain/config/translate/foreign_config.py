"""The config of another program, from which one key after the other is taken.

    KEYS = {"zero_optimization.stage": Taken(_STAGES), "nebula": "checkpoints go to the run"}
    source = Source("ds.json", content, KEYS)
    source.take("zero_optimization.stage")        # 3
    source.put_into(made)                         # what needs no rule, and what was left

A table says of each key what it is here, or why it has no counterpart; a reason that begins with !
holds for `false`, too. What no table has is left as well: releases add keys, and people keep their
own beside them.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.config.translate.translation import Translation
from hpctrain.errors import ConfigError

ALWAYS = "!"
_AUTO = "auto"
_FILLED_IN = "the Hugging Face Trainer fills it in"
_OFF = "it is off, and so it is here"


@dataclass(frozen=True)
class Taken:
    """A key that has a counterpart."""

    # `float`: a number; `str`: a text; or what each allowed value becomes, or a function of it.
    kind: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    ours: str = ""  # our key, also to say what to set in place of "auto"
    default: Any = None
    reason: str = ""  # why some of its values have no counterpart after all
    sets: bool = False  # whether `ours` gets the value; otherwise a rule decides

    def value(self, given: Any, where: str) -> Any:
        """Return what a value becomes, or raise a ConfigError."""
        if self.kind is float:
            if isinstance(given, bool) or not isinstance(given, int | float):
                raise ConfigError(f"{where}={shown(given)}: it must be a number")
        elif self.kind is str:
            if not isinstance(given, str):
                raise ConfigError(f"{where}={shown(given)}: it must be a text")
        elif isinstance(self.kind, Mapping):  # texts are compared in lower case
            lower = given.lower() if isinstance(given, str) else given
            if isinstance(lower, dict | list) or lower not in self.kind:
                listed = ", ".join(str(one) for one in self.kind)
                listed = listed.upper() if shown(given).isupper() else listed
                raise ConfigError(f"{where}={shown(given)}: allowed are {listed}")
            return self.kind[lower]
        elif self.kind is not None:
            return self.kind(given)
        return given


class Source:
    """The keys of a config file, by their dotted names; errors name the file.

    `keys` say for each key what it is here, or for each key or whole section why it is nothing.
    """

    def __init__(
        self, file: str, content: Mapping[str, Any], keys: Mapping[str, Taken | str]
    ) -> None:
        self.file, self._keys = file, keys
        rows = {n: row.reason if isinstance(row, Taken) else row for n, row in keys.items()}
        self._always = {name for name, reason in rows.items() if reason.startswith(ALWAYS)}
        self._reasons = {name: reason.removeprefix(ALWAYS) for name, reason in rows.items()}
        self._values = dict(_leaves(content))
        self._used: set[str] = set()
        self._dropped: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether the file has the key, or keys of this section."""
        return name in self._values or any(key.startswith(f"{name}.") for key in self._values)

    def take(self, name: str) -> Any:
        """Return the value of a key; its default if it is missing, null or "auto"."""
        self._used.add(name)
        row, value = self._keys[name], self._values.get(name)
        assert isinstance(row, Taken)
        if value == _AUTO and name not in self._dropped:
            self.drop(name, f"{_FILLED_IN}: set {row.ours}" if row.ours else _FILLED_IN)
        if value in (None, _AUTO):
            return row.default
        return row.value(value, f"{self.file}: {name}")

    def is_auto(self, name: str) -> bool:
        """Return whether the value of a key is "auto"."""
        return bool(self._values.get(name) == _AUTO)

    def drop(self, name: str, reason: str = "") -> None:
        """Record why a key that was taken has no counterpart after all, if the file has it."""
        self._used.add(name)
        if name in self._values:
            self._dropped[name] = reason or self._reasons[name]

    def put_into(self, made: Translation) -> None:
        """Add what needs no rule, and `KEY=VALUE` of what has no counterpart, with the reasons.

        If all keys are unknown, the file belongs to something else, which is a ConfigError.
        """
        for name, row in self._keys.items():
            if isinstance(row, Taken) and row.sets and (value := self.take(name)) is not None:
                made.values[row.ours] = value
        sections = {part for key in self._keys for part in _prefixes(key) if part != key}
        left, unknown = {}, []
        for name, value in self._values.items():
            section = next((part for part in _prefixes(name) if self._reasons.get(part)), None)
            if name in self._dropped:
                left[f"{name}={shown(value)}"] = self._dropped[name]
            elif name in self._used or (value in ({}, None) and name in sections):
                continue
            elif section is None:
                unknown.append(name)
            elif section != name:
                off = self._values.get(f"{section}.enabled") is False
                left[section] = _OFF if off else self._reasons[section]
            else:
                off = value in (False, None, "none") and name not in self._always
                left[f"{name}={shown(value)}"] = _OFF if off else self._reasons[name]
        if unknown and len(unknown) == len(self._values):
            raise ConfigError(
                "\n".join(f"{self.file}: {name}: {self._unknown(name)}" for name in unknown)
            )
        made.left |= left | {f"{n}={shown(self._values[n])}": self._unknown(n) for n in unknown}

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._keys, n=1, cutoff=0.7)
        last = {key.rpartition(".")[2]: key for key in self._keys}
        inner = difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.8)
        guess = near or [last[key] for key in inner]
        hint = f": did you mean {guess[0]}?" if guess else ""
        return f"there is no such key{hint}"


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
