"""Which stored weights belong to which of a model, by their names, and what is said about it.

    stored name ── the first pattern of `rename` that fits ── name in the model ── skip?
        └── numbers of the same kind? ── shape? ── is anything stored that nobody asks for?

In a pattern `*` stands for any text, dots included. The `*` of `to` stand for what those of `match`
have found: {match: 'transformer.*', to: '*'} removes a prefix.

Numbers have to keep their meaning. Floats of 16, 32 and 64 bits become each other, and integers
become other integers; everything else stays what it is. An integer or a float of 8 bits in place of
a weight is a code: it means nothing without a scale, a zero point or a table under another name,
which the model does not have. This module does not import torch: a login node looks at weights
before a job is queued.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few

Shape = tuple[int, ...]
_SHOWN = 8
_FLOATING = ("float64", "float32", "float16", "bfloat16")
_WORDS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}
_CURE = (
    "take the release of the model in bf16, or dequantize it once (`model.dequantize()` of "
    "transformers, then `save_pretrained`)"
)


@dataclass(frozen=True)
class Rename:
    """A pattern of stored names, and the names that they get, with as many `*` as it or none."""

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


class Dtypes(NamedTuple):
    """The names in torch of the dtypes of stored weights and of the model's, by weight."""

    stored: Mapping[str, str] = {}
    model: Mapping[str, str] = {}


_NO_DTYPES = Dtypes()


@dataclass
class Match:
    """The weights of a model and where they come from.

    Attributes:
        stored: The stored name of each weight of the model that is loaded.
        initial: The other weights of the model, which keep their values.
        unused: The stored weights that the model does not need, by the names that `rename` gives.
    """

    stored: dict[str, str] = field(default_factory=dict)
    initial: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        loaded, total = len(self.stored), len(self.stored) + len(self.initial)
        kept = f"; initial values: {listed(self.initial)}" if self.initial else ""
        return f"{loaded} of {total} weights of the model are loaded{kept}"

    def refuse_unused(self) -> None:
        """Refuse stored weights that the model neither has nor computes, nor `skip` names."""
        if self.unused:
            more = ", …" if len(self.unused) > 3 else ""
            shown = ", ".join(f"'{name}'" for name in self.unused[:3]) + more
            raise ConfigError(
                f"the model has nothing of these names, which are stored: {listed(self.unused)}. "
                "If it calls them otherwise, checkpoint.init_rename gives them its names; if it "
                f"does not need them, name them: checkpoint.init_skip=[{shown}]. If they are the "
                f"scales of quantized weights, {_CURE}"
            )


def match(
    stored: Mapping[str, Shape],
    model: Mapping[str, Shape],
    rename: Sequence[Rename] = (),
    skip: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    dtypes: Dtypes = _NO_DTYPES,
    computes: Callable[[str], bool] = lambda name: False,
) -> Match:
    """Find the stored weight of each weight of a model.

    The first rule of `rename` that fits a name counts. `skip` are patterns of names, of the model
    or stored, that are not loaded. `ties` names the parameter that a weight is the same as.
    `computes` tells whether the model has no weight of a name because it computes it itself.
    """
    targets = _targets(stored, rename)
    _check_patterns(stored, {*targets, *model}, rename, skip)
    found, other = Match(), dict[str, tuple[Shape, Shape]]()
    for name, source in targets.items():
        if any(fnmatchcase(name, pattern) for pattern in skip):
            continue
        if name not in model:
            found.unused += [] if computes(name) else [name]
            continue
        _check_numbers(name, source, dtypes)
        if stored[source] == model[name]:
            found.stored[name] = source
        else:
            other[name] = stored[source], model[name]
    _check_shapes(other)
    ties = ties or {}
    loaded = {ties.get(name, name) for name in found.stored}
    found.initial = [n for n in model if n not in found.stored and ties.get(n, n) not in loaded]
    if not found.stored:
        near = difflib.get_close_matches(next(iter(model), ""), stored, 1, 0.3)
        raise ConfigError(
            f"no weight has a name of the model: there are {listed(list(stored))}, and the model "
            f"has {listed(list(model))}; checkpoint.init_rename changes names, such as "
            f"[{{match: '{(near or list(stored) or [''])[0]}', to: '{next(iter(model), '')}'}}]"
        )
    return found


def _check_numbers(name: str, source: str, dtypes: Dtypes) -> None:
    there, here = dtypes.stored.get(source), dtypes.model.get(name)
    if there and here and not fits(there, here):
        raise ConfigError(
            f"{source} is stored as {there} and is {here} in the model, so the numbers do not mean "
            f"the same. If the weights are quantized, {_CURE}; checkpoint.init_skip=['{name}'] "
            "leaves it out"
        )


def _check_shapes(other: Mapping[str, tuple[Shape, Shape]]) -> None:
    if not other:
        return
    shown = few((misshapen(name, *shapes) for name, shapes in other.items()), _SHOWN, "; ")
    names = sorted(other)[:3]
    raise ConfigError(
        f"weights of another shape: {shown}. checkpoint.init_skip=[{', '.join(names)}] leaves "
        "them out"
    )


def listed(names: Sequence[str]) -> str:
    """Return some of the names as text, and how many more there are."""
    return few(names, _SHOWN)


def _pattern_problem(key: str, pattern: str, names: Sequence[str]) -> str:
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
    stored: Mapping[str, Shape], names: set[str], rename: Sequence[Rename], skip: Sequence[str]
) -> None:
    for rule in rename:
        if all(rule(name) is None for name in stored):
            raise ConfigError(_pattern_problem("checkpoint.init_rename", rule.match, list(stored)))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(_pattern_problem("checkpoint.init_skip", pattern, sorted(names)))


def misshapen(name: str, there: Shape, here: Shape) -> str:
    """Return what is said about a weight whose stored shape is not that in the model."""
    stored, own = (" x ".join(map(str, shape)) or "a scalar" for shape in (there, here))
    return f"{name} is {stored} there and {own} in the model"


def torch_name(dtype: str) -> str:
    """Return the name in torch of a dtype of safetensors, such as bfloat16 for BF16."""
    found = re.fullmatch(r"(BF|F|I|U|C)(\d+.*)", dtype)
    return (_WORDS[found[1]] + found[2] if found else dtype).lower()


def fits(stored: str, own: str) -> bool:
    """Return whether numbers of a stored dtype, such as bfloat16, keep their meaning in our own."""
    return _kind(stored) == _kind(own)


def _kind(dtype: str) -> str:
    if dtype in _FLOATING:
        return "floating"
    if dtype.startswith("complex"):
        return "complex"
    # What safetensors calls F8_E4M3, torch calls float8_e4m3fn.
    return "integer" if dtype.startswith(("int", "uint")) else dtype.removesuffix("fn")
