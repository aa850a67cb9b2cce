"""Check that a `_target_` exists, by reading the files of its package without importing it.

Importing a model's module may import torch, which takes seconds on a login node, or fail there. So
its file is parsed. Where the file does not show its names (compiled modules, `__getattr__`), the
target counts as existing.
"""

import ast
import difflib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
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


def problem(target: str) -> str:
    """Return why `package.module.Name` does not exist, or "" if it does.

    >>> problem("torch.optim.Adamw")
    "torch.optim has no 'Adamw'; it has 'AdamW'"
    """
    if target in _existing:
        return ""
    if not (wrong := _problem(target)):
        _existing.add(target)
    return wrong


_existing: set[str] = set()  # a target that is missing may be installed later, in a notebook


def _problem(target: str) -> str:
    try:
        spec, rest = _located(target)
    except ValueError:  # the module has no spec, such as __main__
        return ""
    if spec is None:
        package = target.partition(".")[0]
        extra = f": pip install 'hpctrain[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
        return f"no package {package!r} here{extra or _misspelt_package(package)}"
    if not rest:
        return f"{target} is a module; name a class or function in it"
    names = _names(spec.origin or "", package_of(spec))
    if names is None:
        return _misspelt_module(spec, rest)
    if rest[0] in names:
        return ""
    known = [*names, *_modules(spec)] if len(rest) > 1 else names
    close = difflib.get_close_matches(rest[0], known, 1)
    return f"{spec.name} has no {rest[0]!r}" + (f"; it has {close[0]!r}" if close else "")


def _misspelt_package(package: str) -> str:
    """Return the name of an installed package that is nearly this one."""
    known = {each.name for each in pkgutil.iter_modules()} | {*sys.stdlib_module_names}
    close = difflib.get_close_matches(package, known, 1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""


def _modules(spec: ModuleSpec) -> list[str]:
    return [each.name for each in pkgutil.iter_modules(spec.submodule_search_locations or [])]


def _misspelt_module(spec: ModuleSpec, rest: list[str]) -> str:
    """Return the error of `package.modle.Name`, if the package may make names when it is asked."""
    if len(rest) < 2 or not rest[0].islower():
        return ""
    close = difflib.get_close_matches(rest[0], _modules(spec), 1, cutoff=0.8)
    return f"{spec.name} has no module {rest[0]!r}; it has {close[0]!r}" if close else ""


def definition(target: str, hops: int = 8) -> tuple[str, ast.stmt] | None:
    """Return the module and the statement that define a target, or None if no source shows them.

    If the module imports the name, its import is followed, at most `hops` times.
    """
    try:
        spec, rest = _located(target)
    except ValueError:
        return None
    if spec is None or len(rest) != 1:
        return None
    bindings = _bindings(spec.origin or "") or {}
    found = bindings.get(rest[0]) or bindings.get(_STAR, [])
    if len(found) != 1:  # what is imported depends on what happens at run time
        return None
    statement = found[0]
    if not isinstance(statement, ast.ImportFrom):
        return spec.name, statement
    source = next(a.name for a in statement.names if {rest[0], "*"} & {a.asname, a.name})
    source = rest[0] if source == "*" else source
    module = imported(statement, package_of(spec))
    return definition(f"{module}.{source}", hops - 1) if hops else None


def package_of(spec: ModuleSpec) -> str:
    """Return the package from which the relative imports of a module start."""
    return spec.name if spec.submodule_search_locations is not None else spec.parent or ""


def imported(statement: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module that an import in this package imports from."""
    for _ in range(statement.level - 1):
        package = package.rpartition(".")[0]
    return ".".join(filter(None, (package if statement.level else "", statement.module)))


def _located(target: str) -> tuple[ModuleSpec | None, list[str]]:
    """Return the innermost module of a target, and the names that are left."""
    package, *rest = target.split(".")
    spec = importlib.util.find_spec(package)
    while spec and rest and (inner := submodule(spec, rest[0])) is not None:
        spec, rest = inner, rest[1:]
    return spec, rest


@lru_cache(maxsize=64)
def _bindings(file: str) -> dict[str, list[ast.stmt]] | None:
    """Return the statements outside of classes and functions that bind each name of a module.

    It is None for a module of which there is no source that Python can read.
    """
    if not file.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it will show what is wrong
        return None
    found: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in bound(ast.Module([statement], [])):
            found.setdefault(name, []).append(statement)
    return found


def submodule(spec: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return the spec of a module in a package; None if there is no such module."""
    folders = spec.submodule_search_locations
    # With its dotted name, a folder without __init__.py is only found if the package is imported.
    found = None if folders is None else PathFinder.find_spec(name, [*folders])
    if found is not None:
        found.name = f"{spec.name}.{name}"
    return found


@lru_cache(maxsize=64)
def _names(file: str, package: str, hops: int = 8) -> frozenset[str] | None:
    """Return the names that a module defines, or None if its file does not show them."""
    bindings = _bindings(file)
    if bindings is None or not hops or {"*", "__getattr__"} & bindings.keys():
        return None
    found = {*bindings}
    for node in (node for each in bindings.get(_STAR, ()) for node in ast.walk(each)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            spec, rest = _located(imported(node, package))
            inner = spec and not rest and _names(spec.origin or "", package_of(spec), hops - 1)
            if not inner:
                return None
            found |= inner
    return frozenset(found)


_STAR = "import *"


def bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines.

    "*" means that there may be others, and "import *" that there are those of another module.
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
                hidden = (n for n in ast.walk(node) if isinstance(n, ast.Global))
                yield from (name for n in hidden for name in n.names)
                yield from ("*" for n in ast.walk(node) if _hides(n))
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    yield _STAR if name == "*" else name
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _ if _hides(node):
                yield "*"
            case _:
                yield from bound(node)


def _hides(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec", "setattr")
