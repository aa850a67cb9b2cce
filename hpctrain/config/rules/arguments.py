"""Check the arguments of a `_target_` by its signature, which its source shows without an import.

    model: {_target_: hpctrain.models.MLP, hidden: 256, nap: 1}
        model.hidden=256: hpctrain.models.MLP takes hidden: Sequence[int], such as [256]
        model.nap=1: hpctrain.models.MLP has no argument nap; it has in_features, hidden, …

Where the source does not show the signature (decorators, metaclasses, compiled modules), nothing is
checked. Only builtin types are compared, since Python itself does not check annotations.
"""

import ast
import collections.abc
import difflib
import functools
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hpctrain.config.rules.targets import definition

_TYPES = {name: getattr(collections.abc, name) for name in ("Sequence", "Mapping", "Iterable")}
_TYPES |= {name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union")}
_TYPES |= {each.__name__: each for each in (int, float, str, bool, list, tuple, dict)}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function; its annotation is "" without one, or if it is not compared."""

    name: str
    annotation: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """The parameters that can be given by name; `anything` if there is a `**kwargs`."""

    parameters: tuple[Parameter, ...]
    anything: bool

    @classmethod
    def of(cls, found: inspect.Signature) -> "Signature | None":
        """Return that of an object that was imported, without types; None if it has `*args`."""
        by_kind = {each.kind for each in found.parameters.values()}
        if by_kind & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}:
            return None
        anything = inspect.Parameter.VAR_KEYWORD in by_kind
        named = [e for e in found.parameters.values() if e.kind != inspect.Parameter.VAR_KEYWORD]
        return cls(tuple(Parameter(e.name, "", e.default is e.empty) for e in named), anything)


def problems(
    section: str,
    node: Mapping[str, Any],
    known: Signature | None,
    positional: int = 0,
    inner: Mapping[str, str] = {},
) -> Iterator[str]:
    """Yield what is wrong with the arguments of a section, whose `_target_` has this signature.

    Names with a leading underscore are Hydra's; `positional` arguments are given by hpctrain
    itself. `inner` has the config keys of arguments that are not in `section` itself. They may come
    from an experiment that chooses another class, so the error says how to remove them.
    """
    if known is None or "_args_" in node:
        return
    target, rest = node["_target_"], known.parameters[positional:]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    keys = {name: inner.get(name, f"{section}.{name}") for name in given}
    for parameter in rest:
        kind = parameter.annotation
        if parameter.name not in given:
            if parameter.required and not node.get("_partial_"):
                needs = f" ({kind})" if kind else ""
                yield f"{section}.{parameter.name} is missing: {target} needs it{needs}"
            continue
        value = given.pop(parameter.name)
        if not _allows(kind, value):
            such = f", such as [{value}]" if _allows(kind, [value]) else ""
            yield f"{keys[parameter.name]}={value}: {target} takes {parameter.name}: {kind}{such}"
    names = [parameter.name for parameter in rest]
    for name, value in {} if known.anything else given.items():
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield (
            f"{keys[name]}={value}: {target} has no argument {name}; {hint}"
            f"it has {', '.join(names) or 'none'}"
            + (f"; '~{inner[name]}' removes it" if name in inner else "")
        )


@functools.lru_cache(maxsize=64)
def signature(target: str) -> Signature | None:
    """Return the signature of a function, or of the constructor of a class, or None if unknown."""
    base: str | None = None
    for _ in range(5):  # a class, and base classes
        match definition(target):
            case _, ast.FunctionDef(decorator_list=[], args=args) if base is None:
                return _signature(args)
            case module, ast.ClassDef(decorator_list=[], keywords=[]) as kind:
                own = [each for each in kind.body if getattr(each, "name", "") == "__init__"]
            case _:
                return None
        names = [getattr(each, "name", "") for each in ast.walk(kind)]
        if own and isinstance(own[-1], ast.FunctionDef) and "__new__" not in names:
            return None if own[-1].decorator_list else _signature(own[-1].args, skip=1)
        match kind.bases:
            case [ast.Name(id=base)] if not {"__init__", "__new__"} & {*names}:
                target = f"{module}.{base}"
            case _:
                return None
    return None


def _signature(given: ast.arguments, skip: int = 0) -> Signature | None:
    if given.posonlyargs or given.vararg:
        return None
    missing = [None] * (len(given.args) - len(given.defaults))
    defaults: list[ast.expr | None] = [*missing, *given.defaults, *given.kw_defaults]
    parameters = [
        Parameter(each.arg, _annotation(each.annotation, default), default is None)
        for each, default in zip([*given.args, *given.kwonlyargs], defaults, strict=True)
    ]
    return Signature(tuple(parameters[skip:]), given.kwarg is not None)


def _annotation(given: ast.expr | None, default: ast.expr | None) -> str:
    """Return an annotation, unless it contradicts its default, as in `width: int = 0.5`."""
    text = ast.unparse(given) if given else ""
    if isinstance(default, ast.Constant) and not _allows(text, default.value):
        return ""
    return text


def _allows(annotation: str, value: Any) -> bool:
    """Return whether a value may have this type; True where that is not known."""
    if not annotation or (isinstance(value, dict) and "_target_" in value):
        return True
    if (kind := _type(annotation)) is None:
        return True
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # A number where a text is annotated usually works: the text is only printed.
        return kind is str and isinstance(value, int | float)
    except TypeError:  # a type that is not compared
        return True
    return True


@functools.cache
def _type(annotation: str) -> Any:
    try:
        return eval(annotation, {"__builtins__": {}}, _TYPES)
    except Exception:  # a name of its module
        return None
