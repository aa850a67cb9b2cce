"""Check the arguments of a `_target_` by the signature in its source, without importing it.

    model: {_target_: hpctrain.models.MLP, hidden: 256, nap: 1}
        model.hidden=256: hpctrain.models.MLP takes hidden: Sequence[int], such as [256]
        model.nap=1: hpctrain.models.MLP has no argument nap; it has in_features, hidden, …

Where the source does not show the signature (decorators, metaclasses, compiled modules), nothing is
checked. Only builtin types are compared, since Python itself does not check annotations.
"""

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.config.rules.targets import bound, definition

_LISTS = {"Sequence", "list", "List", "tuple", "Tuple", "Iterable", "Collection"}
_DICTS = {"Mapping", "dict", "Dict", "MutableMapping"}
_SCALARS = {"int", "float", "str", "bool"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its name, and the expressions of its annotation and default."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None


@dataclass(frozen=True)
class Signature:
    """The parameters that can be given by name; `anything` if there is a `**kwargs`."""

    parameters: tuple[Parameter, ...]
    anything: bool


def problems(
    section: str, node: Mapping[str, Any], positional: int = 0, inner: Mapping[str, str] = {}
) -> Iterator[str]:
    """Yield what is wrong with the arguments of a section, whose `_target_` exists.

    Names with a leading underscore are Hydra's; `positional` arguments are given by hpctrain
    itself. `inner` has the config keys of arguments that are not in `section` itself. They may come
    from an experiment that chooses another class, so the error says how to remove them.
    """
    target = str(node["_target_"])
    known = signature(target)
    if known is None or "_args_" in node:
        return

    def key(name: str) -> str:
        return inner.get(name, f"{section}.{name}")

    rest = known.parameters[positional:]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    for parameter in rest:
        if parameter.name not in given:
            if parameter.default is None and not node.get("_partial_"):
                kind = f" ({ast.unparse(parameter.annotation)})" if parameter.annotation else ""
                yield f"{section}.{parameter.name} is missing: {target} needs it{kind}"
            continue
        value = given.pop(parameter.name)
        if wrong := _mismatch(parameter, value):
            yield f"{key(parameter.name)}={value}: {target} takes {wrong}"
    names = [parameter.name for parameter in rest]
    for name, value in {} if known.anything else given.items():
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield (
            f"{key(name)}={value}: {target} has no argument {name}; {hint}"
            f"it has {', '.join(names) or 'none'}"
            + (f"; '~{inner[name]}' removes it" if name in inner else "")
        )


@functools.lru_cache(maxsize=64)
def signature(target: str) -> Signature | None:
    """Return the signature of a function, or of the constructor of a class, or None if unknown."""
    base: str | None = None
    for _ in range(5):  # a class, and base classes
        found = definition(target)
        match found:
            case _, ast.FunctionDef(decorator_list=[], args=args) if base is None:
                return _signature(args)
            case module, ast.ClassDef(decorator_list=[], keywords=[]) as kind:
                names = set(bound(ast.Module(kind.body, [])))
            case _:
                return None
        own = [each for each in kind.body if getattr(each, "name", "") == "__init__"]
        if own and isinstance(own[-1], ast.FunctionDef) and "__new__" not in names:
            return None if own[-1].decorator_list else _signature(own[-1].args, skip=1)
        if {"__init__", "__new__", "*"} & names:
            return None
        match kind.bases:
            case [ast.Name(id=base)]:
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
        Parameter(each.arg, each.annotation, default)
        for each, default in zip([*given.args, *given.kwonlyargs], defaults, strict=True)
    ]
    return Signature(tuple(parameters[skip:]), given.kwarg is not None)


def _mismatch(parameter: Parameter, value: Any) -> str:
    """Return what the parameter takes, if the value is none of it; otherwise ""."""
    annotation = parameter.annotation
    if annotation is None or _allows(annotation, value):
        return ""
    # Some annotations contradict their default, as in `width: int = 0.5`. Then a value of the type
    # of the default is taken, too.
    match parameter.default:
        case ast.Constant(value=default) if not _allows(annotation, default):
            if type(value) is type(default):
                return ""
    text = f"{parameter.name}: {ast.unparse(annotation)}"
    return f"{text}, such as [{value}]" if _allows(annotation, [value]) else text


def _allows(annotation: ast.expr, value: Any) -> bool:
    """Return whether a value may have this type; True where that is not known."""
    if isinstance(value, dict) and "_target_" in value:
        return True
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            try:
                return _allows(ast.parse(text, mode="eval").body, value)
            except SyntaxError:
                return True
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _allows(left, value) or _allows(right, value)
        case ast.Subscript(value=generic, slice=inner):
            return _generic_allows(ast.unparse(generic).rpartition(".")[2], inner, value)
    name = ast.unparse(annotation).rpartition(".")[2]
    if name in _LISTS:
        return isinstance(value, list | tuple)
    if name in _DICTS:
        return isinstance(value, dict)
    if name not in _SCALARS:
        return True
    if isinstance(value, bool):  # Python would count with True as with 1
        return name in ("bool", "str")
    kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool, int)}
    # A number where a text is annotated usually works: the text is only printed.
    return isinstance(value, kinds[name]) or (name == "str" and isinstance(value, int | float))


def _generic_allows(name: str, inner: ast.expr, value: Any) -> bool:
    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Optional":
        return value is None or _allows(inner, value)
    if name == "Union":
        return any(_allows(item, value) for item in items)
    if name == "Annotated":
        return _allows(items[0], value)
    if name == "Literal":
        return value in [getattr(item, "value", value) for item in items]
    if name in _LISTS:
        if not isinstance(value, list | tuple):
            return False
        if len(items) == 1 or (items and ast.unparse(items[-1]) == "..."):
            return all(_allows(items[0], each) for each in value)
        return len(items) == len(value) and all(map(_allows, items, value))
    return name not in _DICTS or isinstance(value, dict)
