"""Check the arguments of a `_target_` by its signature, which its source shows without an import.

    model: {_target_: hpctrain.models.MLP, hidden: 256, nap: 1}
        model.hidden=256: hpctrain.models.MLP takes hidden: Sequence[int], such as [256]
        model.nap=1: hpctrain.models.MLP has no argument nap; it has in_features, hidden, …

Where the source does not show the signature (decorators, metaclasses, inherited constructors,
compiled modules), nothing is checked. Only builtin types are compared, as they are written there.
"""

import ast
import collections.abc
import difflib
import functools
import typing
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

import msgspec

from hpctrain.config.rules.targets import definition

_TYPES = vars(typing) | vars(collections.abc)


def named(known: Signature) -> list[str]:
    """Return the parameters that can be given by name."""
    return [each.name for each in known.parameters.values() if each.kind != each.VAR_KEYWORD]


def takes_any(known: Signature) -> bool:
    """Return whether there is a `**kwargs`."""
    return any(each.kind == each.VAR_KEYWORD for each in known.parameters.values())


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
    unnamed = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
    if known is None or "_args_" in node:
        return
    if any(each.kind in unnamed for each in known.parameters.values()):
        return
    target, names = node["_target_"], named(known)[positional:]
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    keys = {name: inner.get(name, f"{section}.{name}") for name in given}
    for parameter in (known.parameters[name] for name in names):
        kind = parameter.annotation if isinstance(parameter.annotation, str) else ""
        if parameter.name not in given:
            if parameter.default is parameter.empty and not node.get("_partial_"):
                needs = f" ({kind})" if kind else ""
                yield f"{section}.{parameter.name} is missing: {target} needs it{needs}"
            continue
        value = given.pop(parameter.name)
        if not _allows(kind, value):
            such = f", such as [{value}]" if _allows(kind, [value]) else ""
            yield f"{keys[parameter.name]}={value}: {target} takes {parameter.name}: {kind}{such}"
    for name, value in {} if takes_any(known) else given.items():
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield (
            f"{keys[name]}={value}: {target} has no argument {name}; {hint}"
            f"it has {', '.join(names) or 'none'}"
            + (f"; '~{inner[name]}' removes it" if name in inner else "")
        )


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
