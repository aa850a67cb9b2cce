"""Which stored weights belong to which of a model, by their names, and what is said about it.

    stored name ── the first pattern of `rename` that fits ── name in the model ── skip? ── shape?

In a pattern `*` stands for any text, dots included. The `*` of `to` stand for what those of `match`
have found: {match: 'transformer.*', to: '*'} removes a prefix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hpctrain.errors import ConfigError

Shape = tuple[int, ...]
_SHOWN = 8


@dataclass(frozen=True)
class Rename:
    """A pattern of stored names, and the names that they get.

    Attributes:
        match: The pattern.
        to: The new name; it has as many `*` as `match`, or none.
    """

    match: str
    to: str

    def __call__(self, name: str) -> str | None:
        """Return the new name; None if the pattern does not fit."""
        pattern = "(.*)".join(map(re.escape, self.match.split("*")))
        found = re.fullmatch(pattern, name)
        if found is None:
            return None
        first, *rest = self.to.split("*")
        return first + "".join(a + b for a, b in zip(found.groups(), rest, strict=False))


def renames(rules: Sequence[Mapping[str, Any]]) -> list[Rename]:
    """Return the rules of `checkpoint.init_rename`, which are validated."""
    return [Rename(str(rule["match"]), str(rule["to"])) for rule in rules]


@dataclass
class Match:
    """The weights of a model and where they come from.

    Attributes:
        stored: The stored name of each weight of the model that is loaded.
        renamed: The weights whose stored name is another one.
        skipped: The weights that `skip` leaves out, although they are stored.
        initial: The other weights of the model that are not stored: they keep their values.
        unused: The stored weights that the model does not have.
        other_shape: Weights whose shapes differ: the stored one, and that of the model.
    """

    stored: dict[str, str] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield what a user wants to know, one sentence a line."""
        total = len(self.stored) + len(self.initial) + len(self.skipped)
        renamed = f", {len(self.renamed)} of them renamed" if self.renamed else ""
        yield f"{len(self.stored)} of {total} weights of the model are loaded{renamed}"
        if self.initial:
            yield f"{len(self.initial)} keep their initial values: {listed(self.initial)}"
        if self.skipped:
            yield f"{len(self.skipped)} are left out by init_skip: {listed(self.skipped)}"
        if self.unused:
            yield f"{len(self.unused)} stored weights are not used: {listed(self.unused)}"


def match(
    stored: Mapping[str, Shape],
    model: Mapping[str, Shape],
    rename: Sequence[Rename] = (),
    skip: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
) -> Match:
    """Find the stored weight of each weight of a model.

    Args:
        stored: The shapes of the stored weights by name.
        model: The shapes of the model's weights by name.
        rename: How stored names become those of the model. The first rule that fits counts.
        skip: Patterns of names of the model that are not loaded.
        ties: Weights that are the same parameter as another one: its name.

    Raises:
        ConfigError: A pattern fits nothing, two weights get one name, shapes differ, or nothing
            matches.
    """
    targets = _targets(stored, rename)
    _check_patterns(stored, {*targets, *model}, rename, skip)
    found = Match()
    for name, source in targets.items():
        if name not in model:
            found.unused.append(source)
        elif any(fnmatchcase(name, pattern) for pattern in skip):
            found.skipped.append(name)
        elif stored[source] != model[name]:
            found.other_shape[name] = stored[source], model[name]
        else:
            found.stored[name] = source
            if name != source:
                found.renamed.append(name)
    ties = ties or {}
    loaded = {ties.get(name, name) for name in found.stored}
    known = {*found.stored, *found.skipped, *found.other_shape}
    found.initial = [n for n in model if n not in known and ties.get(n, n) not in loaded]
    if found.other_shape:
        shown = [
            f"{name} is {shape_text(there)} there and {shape_text(here)} in the model"
            for name, (there, here) in list(found.other_shape.items())[:_SHOWN]
        ]
        more = len(found.other_shape) - len(shown)
        names = sorted(found.other_shape)[:3]
        raise ConfigError(
            f"weights of another shape: {'; '.join(shown)}"
            + (f"; and {more} more" if more else "")
            + f". checkpoint.init_skip=[{', '.join(names)}] leaves them out"
        )
    if not found.stored:
        near = difflib.get_close_matches(next(iter(model), ""), stored, 1, 0.3)
        raise ConfigError(
            f"no weight has a name of the model: there are {listed(list(stored))}, and the model "
            f"has {listed(list(model))}; checkpoint.init_rename changes names, such as "
            f"[{{match: '{(near or list(stored) or [''])[0]}', to: '{next(iter(model), '')}'}}]"
        )
    return found


def listed(names: Sequence[str]) -> str:
    """Return some of the names as text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _pattern_problem(key: str, pattern: str, names: Sequence[str]) -> str:
    """Return the message about a pattern that fits none of the names."""
    near = difflib.get_close_matches(pattern, names, 3, 0.4) or list(names)[:3]
    return f"{key}={pattern}: it fits no name; there are {', '.join(near)} and others"


def _targets(stored: Mapping[str, Shape], rename: Sequence[Rename]) -> dict[str, str]:
    """Return the stored name by the name that it gets."""
    targets: dict[str, str] = {}
    for name in stored:
        new = next((to for rule in rename if (to := rule(name)) is not None), name)
        if new in targets:
            raise ConfigError(
                f"checkpoint.init_rename: {targets[new]} and {name} would both be {new}"
            )
        targets[new] = name
    return targets


def _check_patterns(
    stored: Mapping[str, Shape],
    names: set[str],
    rename: Sequence[Rename],
    skip: Sequence[str],
) -> None:
    for rule in rename:
        if all(rule(name) is None for name in stored):
            raise ConfigError(_pattern_problem("checkpoint.init_rename", rule.match, list(stored)))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(_pattern_problem("checkpoint.init_skip", pattern, sorted(names)))


def shape_text(shape: Shape) -> str:
    """Return a shape as text: `64 x 8`."""
    return " x ".join(map(str, shape)) or "a scalar"
