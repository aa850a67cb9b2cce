"""How a config key is declared: its default and everything that holds for it, in one place.

    window: int = key(64, "This many blocks are mixed at a time.", count="blocks")

Validation, the reference (`--help NAME`), `--help all` and the identity of a run all read
these declarations. Rules between several keys are functions in hpctrain/config/validate.py and
hpctrain/config/rules.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar

from hpctrain.base import gone

T = TypeVar("T")

REQUIRED = "???"  # omegaconf.MISSING, whose import takes 0.1 s; `--help` does not need it
TOO_LARGE = 2**62  # for any number with a lower bound: the sum of two still fits 64 bits


@dataclass(eq=False, repr=False)
class Rule:
    """What holds for one key, or for a section. These are the keyword arguments of `key`."""

    text: str  # whole sentences: what the key does, and what null means
    unit: str = ""  # what a number counts, or its physical unit
    # The allowed values, or the allowed items of a list and values of a dict; None is null.
    choices: tuple[Any, ...] = ()
    pattern: tuple[str, str] | None = None  # what a text must match, and that in words
    at_least: float | None = None  # the lowest allowed number
    above: float | None = None  # allowed numbers are greater
    at_most: float | None = None  # the highest allowed number
    below: float | None = None  # allowed numbers are less
    check: Callable[[Any], str] | None = None  # any other rule: returns what is wrong, or ""
    # Whether the value decides the result of a run and so its name. It is False for what only
    # changes speed, memory, places or reports.
    identity: bool = True

    def problem(self, name: str, value: Any) -> str:
        """Return what is wrong with the value of the key `name`, or "".

        Null passes the bounds: the key's type says whether null is allowed.
        """
        if self.choices:
            items = [*value.values()] if isinstance(value, dict) else value
            items = items if isinstance(items, list) else [value]
            if all(item in self.choices for item in items):
                return ""
            left = gone.sentence(f"{name}={value}")
            return left or f"{name}={value}: allowed are {self.allowed}"
        if self.check is not None:
            wrong = self.check(value)
            return f"{name}={value!r}: {wrong}" if wrong else ""
        if value is None:
            return ""
        if self.pattern is not None and not re.fullmatch(self.pattern[0], value, re.ASCII):
            return f"{name}={value!r}: {self.pattern[1]}"
        for _, holds, limit in self._limits:
            if not holds(value, limit):
                return f"{name}={value}: it must be {self.allowed}"
        is_open = self.at_most is None and self.below is None
        if self._limits and is_open and value >= TOO_LARGE:
            return f"{name}={value}: it must be less than 2^62"
        return ""

    @functools.cached_property
    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        """The bounds that there are: the words, what must hold for a value, and the bound."""
        bounds = (
            ("at least", operator.ge, self.at_least),
            ("greater than", operator.gt, self.above),
            ("at most", operator.le, self.at_most),
            ("less than", operator.lt, self.below),
        )
        return [(words, holds, limit) for words, holds, limit in bounds if limit is not None]

    @property
    def allowed(self) -> str:
        """The allowed values in words; "" when only the type limits them."""
        if self.choices:
            return ", ".join("null" if value is None else str(value) for value in self.choices)
        return " and ".join(f"{words} {limit}" for words, _, limit in self._limits)


def key(default: T, text: str, *, count: str = "", **rule: Any) -> T:
    """Declare a key of a section: a dataclass field with a `Rule`, whose attributes are `rule`.

    `count` is the unit of a number of things, of which there is at least 1.
    """
    rule |= {"unit": count, "at_least": 1} if count else {}
    metadata = {"rule": Rule(text, **rule)}
    made: Any
    if isinstance(default, (list, dict)):
        made = field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    return made  # type: ignore[no-any-return]


def section(schema: type[T], *, identity: bool = True) -> T:
    """Declare a section: a dataclass whose docstring describes it.

    Without `identity`, no key of the section is part of the run's identity.
    """
    text = (schema.__doc__ or "").partition("\n")[0]
    metadata = {"rule": Rule(text, identity=identity)}
    made: Any = field(default_factory=schema, metadata=metadata)
    return made  # type: ignore[no-any-return]


@dataclass(eq=False, repr=False)
class Member:
    """A key or a section of the schema."""

    name: str  # dotted, such as `data.window`
    type: str  # as it is written in the schema
    default: Any  # that of a section is an object with all its defaults
    rule: Rule
    identity: bool  # its own rule and those of its sections
    is_section: bool
    value: Callable[[Any], Any]  # returns the member's value in a config


@functools.cache
def members(schema: type) -> tuple[Member, ...]:
    """Return all sections and keys of a schema, each section before its keys."""
    return tuple(_walk(schema, "", True))


def keys(schema: type) -> tuple[Member, ...]:
    """Return all keys of a schema, without the sections."""
    return tuple(member for member in members(schema) if not member.is_section)


def changed(config: Any) -> list[tuple[Member, Any]]:
    """Return the keys of a config that differ from their defaults, each with its value."""
    known = keys(type(config))
    return [(key, value) for key in known if (value := key.value(config)) != key.default]


def _walk(schema: Any, prefix: str, identity: bool) -> list[Member]:
    found: list[Member] = []
    for declared in fields(schema):
        factory: Any = declared.default_factory
        default = declared.default if factory is MISSING else factory()
        rule: Rule = declared.metadata["rule"]
        name, part = prefix + declared.name, identity and rule.identity
        # Annotations are text in the schema (from __future__), as a user reads them.
        is_section, value = is_dataclass(factory), attrgetter(name)
        found.append(Member(name, str(declared.type), default, rule, part, is_section, value))
        if is_section:
            found.extend(_walk(factory, f"{name}.", part))
    return found
