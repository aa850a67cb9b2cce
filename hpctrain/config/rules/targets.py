"""Find what a `_target_` names in the files of its package, and check its arguments, unimported.

    model: {_target_: hpctrain.models.MLP, hidden: 256, nap: 1}
        model.hidden=256: hpctrain.models.MLP takes hidden: Sequence[int], such as [256]
        model.nap=1: hpctrain.models.MLP has no argument nap; it has in_features, hidden, …

Importing a model's module may import torch, which takes seconds on a login node, or fail there. So
the files are parsed. Where they do not show a name plainly (compiled modules, `import *`, names
that are bound twice), nothing is known of it. Where the source does not show the signature
(decorators, metaclasses, inherited constructors), its arguments are not checked. Only builtin types
are compared, as they are written there.
"""

import ast
import collections.abc
import difflib
import functools
import symtable
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import msgspec

# The extras of hpctrain that install a package with models.
_EXTRAS = {
    "timm": "vision",
    "torchvision": "vision",
    "torchmetrics": "metrics",
    "transformers": "transformers",
}


def is_own(target: str) -> bool:
    """Return whether a target is of hpctrain or torch; a submission imports the others."""
    return target.partition(".")[0] in ("hpctrain", "torch")


def problem(target: str) -> str:
    """Return why `package.module.Name` cannot be there, or "".

    >>> problem("torch.optim.Adamw")
    "torch.optim has no 'Adamw'; it has 'AdamW'"
    """
    try:
        spec, rest = _located(target)
    except ValueError:  # the module has no spec, such as __main__
        return ""
    if spec is None:
        package = target.partition(".")[0]
        extra = f": pip install 'hpctrain[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
        return f"no package {package!r} here{extra}"
    if not rest:
        return f"{target} is a module; name a class or function in it"
    names = _bindings(spec.origin or "") if is_own(target) else None
    if names is None or {rest[0], "*", "__getattr__"} & names.keys():
        return ""
    return absent(spec.name, rest[0], names)


def absent(module: str, name: str, names: Mapping[str, object]) -> str:
    """Return that a module does not have a name, with the nearest of those that it has."""
    close = difflib.get_close_matches(name, [*names], 1)
    return f"{module} has no {name!r}" + (f"; it has {close[0]!r}" if close else "")


def definition(target: str) -> ast.stmt | None:
    """Return the statement that defines a target, or None if no source shows it.

    If the module imports the name, its import is followed.
    """
    try:
        spec, rest = _located(target)
    except ValueError:
        return None
    if spec is None or len(rest) != 1:
        return None
    found = (_bindings(spec.origin or "") or {}).get(rest[0])
    if not isinstance(found, ast.ImportFrom):
        return found
    source = next(a.name for a in found.names if rest[0] in (a.asname, a.name))
    module = resolve_name("." * found.level + (found.module or ""), spec.parent)
    outer = f"{module}.{source}"
    return None if outer == target else definition(outer)


def _submodule(spec: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return the spec of a module in a package; None if there is no such module."""
    folders = spec.submodule_search_locations
    # With its dotted name, a folder without __init__.py is only found if the package is imported.
    found = None if folders is None else PathFinder.find_spec(name, [*folders])
    if found is not None:
        found.name = f"{spec.name}.{name}"
    return found


def _located(target: str) -> tuple[ModuleSpec | None, list[str]]:
    """Return the innermost module of a target, and the names that are left."""
    package, *rest = target.split(".")
    spec = find_spec(package)
    while spec and rest and (inner := _submodule(spec, rest[0])) is not None:
        spec, rest = inner, rest[1:]
    return spec, rest


@lru_cache(maxsize=64)
def _bindings(file: str) -> dict[str, ast.stmt | None] | None:
    """Return the statement that binds each name of a module; None for one that is not plain.

    It is None for a module of which there is no source that Python can read.
    """
    if not file.endswith(".py"):
        return None
    try:
        text = Path(file).read_text()
        tree, names = ast.parse(text), symtable.symtable(text, file, "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):  # importing it will show what is wrong
        return None
    found: dict[str, ast.stmt | None] = {
        name.get_name(): None for name in names if name.is_assigned() or name.is_imported()
    }
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            found |= {alias.asname or alias.name: statement for alias in statement.names}
    return found


_TYPES = vars(typing) | vars(collections.abc)


def named(known: Signature) -> list[str]:
    """Return the parameters that can be given by name."""
    return [each.name for each in known.parameters.values() if each.kind != each.VAR_KEYWORD]


def takes_any(known: Signature) -> bool:
    """Return whether there is a `**kwargs`."""
    return any(each.kind == each.VAR_KEYWORD for each in known.parameters.values())


def misfits(
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
    unnamed = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
    kinds = [each.kind for each in known.parameters.values()] if known else []
    if known is None or "_args_" in node or {*unnamed} & {*kinds}:
        return
    target, names = node["_target_"], named(known)[positional:]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    keys = {name: inner.get(name, f"{section}.{name}") for name in given}
    for name, parameter in ((name, known.parameters[name]) for name in names):
        kind = parameter.annotation if isinstance(parameter.annotation, str) else ""
        if name in given:
            yield from _of_type(keys[name], given.pop(name), f"{target} takes {name}", kind)
        elif parameter.default is parameter.empty and not node.get("_partial_"):
            needs = f" ({kind})" if kind else ""
            yield f"{section}.{name} is missing: {target} needs it{needs}"
    for name, value in {} if takes_any(known) else given.items():
        removes = f"; '~{inner[name]}' removes it" if name in inner else ""
        yield f"{keys[name]}={value}: {_no_argument(target, name, names)}{removes}"


def _of_type(key: str, value: Any, takes: str, kind: str) -> Iterator[str]:
    """Yield that a value does not have the type of the annotation `kind`, if it has not."""
    if not _allows(kind, value):
        such = f", such as [{value}]" if _allows(kind, [value]) else ""
        yield f"{key}={value}: {takes}: {kind}{such}"


def _no_argument(target: str, name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{target} has no argument {name}; {hint}it has {', '.join(names) or 'none'}"


@functools.lru_cache(maxsize=64)
def signature(target: str) -> Signature | None:
    """Return the signature of a function, or of the constructor of a class, or None if unknown.

    Annotations are the texts of the source, and a default is only known to be there.
    """
    match definition(target):
        case ast.FunctionDef(decorator_list=[], args=args):
            return _signature(args)
        case ast.ClassDef(decorator_list=[], keywords=[], body=body) as kind:
            names = [getattr(each, "name", "") for each in ast.walk(kind)]
            for each in body if "__new__" not in names else ():
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    return None if each.decorator_list else _signature(each.args, skip=1)
    return None


def _signature(given: ast.arguments, skip: int = 0) -> Signature | None:
    if given.posonlyargs or given.vararg:
        return None
    missing = [None] * (len(given.args) - len(given.defaults))
    defaults = [*missing, *given.defaults, *given.kw_defaults]
    parameters = [
        Parameter(
            each.arg,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is None else ...,
            annotation=ast.unparse(each.annotation) if each.annotation else Parameter.empty,
        )
        for each, default in zip([*given.args, *given.kwonlyargs], defaults, strict=True)
    ]
    rest = [Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)] if given.kwarg else []
    return Signature([*parameters[skip:], *rest])


def _allows(annotation: str, value: Any) -> bool:
    """Return whether a value may have this type; True where that is not known."""
    if not annotation or (isinstance(value, dict) and "_target_" in value):
        return True
    try:
        kind = eval(annotation, _TYPES)  # of hpctrain or torch
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # A number where a text is annotated usually works: the text is only printed.
        return kind is str and isinstance(value, int | float)
    except Exception:  # a name of its module, or a type that is not compared
        return True
    return True
