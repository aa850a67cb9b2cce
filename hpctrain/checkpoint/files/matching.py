"""Which stored weights belong to which of a model, by their names, and what is said about it.

    stored name ── the first pattern of `rename` that fits ── name in the model ── skip?
        └── numbers of the same kind? ── shape? ── is anything stored that nobody asks for?

In a pattern `*` stands for any text, dots included. The `*` of `to` stand for what those of `match`
have found: {match: 'transformer.*', to: '*'} removes a prefix.

Numbers have to keep their meaning. Floats of 16, 32 and 64 bits become each other, and integers
become other integers; everything else stays what it is. An integer or a float of 8 bits in place of
a weight is a code: it means nothing without a scale, a zero point or a table under another name.
This module does not import torch: a login node looks at weights before a job is queued.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hpctrain.errors import ConfigError
from hpctrain.terminal import few

Shape = tuple[int, ...]
_SHOWN = 8
_FLOATING = ("float64", "float32", "float16", "bfloat16")
_WORDS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}
_PACKED = (
    (".qweight", ".scales", "GPTQ or AWQ"),
    (".weight_packed", ".weight_scale", "compressed-tensors"),
    ("_blocks", "_scales", "MXFP4"),
    (".weight", ".weight.absmax", "bitsandbytes with 4 bits"),
    (".weight", ".SCB", "bitsandbytes with 8 bits"),
    (".weight", ".weight_scale_inv", "8-bit floats with scales"),
    (".weight", ".weight_scale", "8 bits with scales"),
    (".W_q", ".scale", "HQQ"),
    (".weight._data", ".weight._scale", "quanto"),
)
"""How the names of codes end, and those of their scales, and what the format is called."""

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
        renamed: The weights whose stored name is another one.
        skipped: The weights that `skip` leaves out, although they are stored.
        initial: The other weights of the model that are not stored: they keep their values.
        unused: The stored weights that the model does not have, by the names that `rename` gives.
        needless: Those of them that it does not need: it computes them itself, `skip` names them,
            or they are a parameter that is loaded under another name.
        other_shape: Weights whose shapes differ: the stored one, and that of the model.
    """

    stored: dict[str, str] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
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
        if self.needless:
            yield f"{len(self.needless)} stored weights are not needed: {listed(self.needless)}"

    def refuse_unused(self) -> None:
        """Refuse stored weights that the model neither has nor computes, nor `skip` names."""
        if self.unused:
            more = ", …" if len(self.unused) > 3 else ""
            shown = ", ".join(f"'{name}'" for name in self.unused[:3]) + more
            raise ConfigError(
                f"the model has nothing of these names, which are stored: {listed(self.unused)}. "
                "If it calls them otherwise, checkpoint.init_rename gives them its names; if it "
                f"does not need them, name them: checkpoint.init_skip=[{shown}]"
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
    found = Match()
    for name, source in targets.items():
        skipped = any(fnmatchcase(name, pattern) for pattern in skip)
        if name not in model:
            (found.needless if skipped or computes(name) else found.unused).append(name)
        elif skipped:
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
    shared = [name for name in found.skipped if ties.get(name, name) in loaded]
    found.skipped = [name for name in found.skipped if name not in shared]
    found.needless += shared
    found.initial = [n for n in model if n not in known and ties.get(n, n) not in loaded]
    left_out = {*found.skipped, *found.needless}
    _check_numbers({n: s for n, s in targets.items() if n not in left_out}, dtypes)
    _check_shapes(found.other_shape)
    if not found.stored:
        near = difflib.get_close_matches(next(iter(model), ""), stored, 1, 0.3)
        raise ConfigError(
            f"no weight has a name of the model: there are {listed(list(stored))}, and the model "
            f"has {listed(list(model))}; checkpoint.init_rename changes names, such as "
            f"[{{match: '{(near or list(stored) or [''])[0]}', to: '{next(iter(model), '')}'}}]"
        )
    return found


def _check_numbers(targets: Mapping[str, str], dtypes: Dtypes) -> None:
    there = {source: dtypes.stored[source] for source in targets.values() if dtypes.stored}
    own = {source: dtypes.model[name] for name, source in targets.items() if name in dtypes.model}
    codes = [(n, what) for n, what in _packed(there) if there[n] != own.get(n)]
    if codes:
        raise ConfigError(
            f"the weights are quantized ({codes[0][1]}): {listed([name for name, _ in codes])} "
            f"hold codes, which are no weights without their scales; {_CURE}"
        )
    for name, source in targets.items():
        if source in there and source in own and not fits(there[source], own[source]):
            raise ConfigError(
                f"{source} is stored as {there[source]} and is {own[source]} in the model, so the "
                f"numbers do not mean the same. If the weights are quantized, {_CURE}; "
                f"checkpoint.init_skip=['{name}'] leaves it out"
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


def _packed(dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield weights that are stored as codes beside their scales, and the name of the format."""
    for name, dtype in dtypes.items():
        if _kind(dtype) in ("floating", "complex", "bool"):
            continue
        for codes, scales, what in _PACKED:
            if name.endswith(codes) and name.removesuffix(codes) + scales in dtypes:
                yield name, what
                break


def _kind(dtype: str) -> str:
    if dtype in _FLOATING:
        return "floating"
    if dtype.startswith("complex"):
        return "complex"
    # What safetensors calls F8_E4M3, torch calls float8_e4m3fn.
    return "integer" if dtype.startswith(("int", "uint")) else dtype.removesuffix("fn")
