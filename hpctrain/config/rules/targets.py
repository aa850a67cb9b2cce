"""Find what a `_target_` names in the files of its package, without importing it.

Importing a model's module may import torch, which takes seconds on a login node, or fail there. So
the files are parsed. Where they do not show a name plainly (compiled modules, `import *`, names
that are bound twice), nothing is known of it.
"""

import ast
import difflib
import importlib.util
import symtable
from collections.abc import Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

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
    outer = f"{imported(found, _package_of(spec))}.{source}"
    return None if outer == target else definition(outer)


def _package_of(spec: ModuleSpec) -> str:
    """Return the package from which the relative imports of a module start."""
    return spec.name if spec.submodule_search_locations is not None else spec.parent or ""


def imported(statement: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module that an import in this package imports from."""
    for _ in range(statement.level - 1):
        package = package.rpartition(".")[0]
    return ".".join(filter(None, (package if statement.level else "", statement.module)))


def submodule(spec: ModuleSpec, name: str) -> ModuleSpec | None:
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
    spec = importlib.util.find_spec(package)
    while spec and rest and (inner := submodule(spec, rest[0])) is not None:
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
