"""The modules that a training consists of, found and compared without importing them.

    config ── _target_: my_net.Net ── my_net.py ── import helper ── helper.py ── …

These are the modules of the user: those in the folders that `git.code_folders` names. Installed
packages and hpctrain are recorded by their versions.

Comments, docstrings and the layout of the lines do not change what is trained, so they do not
count.
"""

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import xxhash

from hpctrain import secrets
from hpctrain.config.frozen import targets
from hpctrain.config.rules.targets import imported, package_of, submodule
from hpctrain.record import Record
from hpctrain.runs.code.git import code_folders

_LARGEST = 4 << 20  # bytes of a module whose text is kept
_NOT_USERS = ("hpctrain", "__main__")
_NO_PART = ("tracking", "notify")  # sections that have no part in the result
_SHOWN = 3  # files
_NO_TREE = (SyntaxError, ValueError, RecursionError)  # no Python, or an expression of many parts


class Module(Record, frozen=True):
    """A module."""

    file: str  # the path in the folder that Python imports it from
    text: str  # its source, with `***` for secrets; of a compiled module, the digest of the file


def search_path() -> list[Path]:
    """Return the folders of the user that this process imports from, in Python's order."""
    folders = code_folders()
    known = set(folders)
    imports = (Path(place or ".").resolve() for place in sys.path)
    first = [folder for folder in dict.fromkeys(imports) if folder in known]
    # With PYTHONSAFEPATH, as in a job with a copy of the code, the working directory is no place.
    return first + [each for each in folders if each not in first and each != Path.cwd()]


def find(
    config: Mapping[str, Any], folders: Sequence[Path] | None = None, also: Iterable[str] = ()
) -> dict[str, Module]:
    """Return the modules of a training by name; every `_target_` of the plain config counts.

    Python looks for them in these folders, or where this process does. `also` names more modules,
    which no `import` in the source names.
    """
    places = tuple(search_path() if folders is None else folders)
    sections = {name: node for name, node in config.items() if name not in _NO_PART}
    todo = [*targets(sections), *also]
    found: dict[str, Module] = {}
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name.partition(".")[0] in _NOT_USERS:
            continue
        seen.add(name)
        for spec in _located(name, places):
            if spec.name in found or not spec.origin:
                continue
            file = Path(spec.origin)
            try:
                facts = file.stat()
                text, imports = _read(file, package_of(spec), facts.st_mtime_ns, facts.st_size)
            except OSError:  # the import will tell it
                continue
            root = next((each for each in places if file.is_relative_to(each)), file.parent)
            found[spec.name] = Module(str(file.relative_to(root)), text)
            todo += imports
    return dict(sorted(found.items()))


def loaded(before: Iterable[str]) -> list[str]:
    """Return the user's modules that were imported since `sys.modules` had those names."""
    folders = search_path()
    new = {*sys.modules} - {*before}
    files = {name: getattr(sys.modules[name], "__file__", None) for name in new}
    return sorted(
        name
        for name, file in files.items()
        if file
        and name.partition(".")[0] not in _NOT_USERS
        and any(Path(file).resolve().is_relative_to(folder) for folder in folders)
        and not {"site-packages", "dist-packages"} & {*Path(file).parts}
    )


def difference(before: Mapping[str, Module], now: Mapping[str, Module], since: str) -> str:
    """Return in one line which files differ; "" if none do.

    >>> difference(before, now, "attempt 1")
    "net.py: changed since attempt 1; helper.py: new"
    """
    told = [
        (old.file if old else new.file, change)  # type: ignore[union-attr]
        for name in sorted({*before, *now})
        for old, new in [(before.get(name), now.get(name))]
        if (change := _change(old, new))
    ]
    texts = [
        f"{file}: {what}" + ("" if i else f" since {since}")
        for i, (file, what) in enumerate(told[:_SHOWN])
    ]
    if (more := len(told) - _SHOWN) > 0:
        texts.append(f"{more} more {'file' if more == 1 else 'files'}")
    return secrets.mask("; ".join(texts))


def _located(name: str, folders: Sequence[Path]) -> Iterator[ModuleSpec]:
    """Yield the package, the inner packages and the module of a dotted name, as far as they are."""
    package, *rest = name.split(".")
    spec = PathFinder.find_spec(package, [*map(str, folders)])
    while spec is not None:
        yield spec
        spec = submodule(spec, rest.pop(0)) if rest else None


@functools.lru_cache(maxsize=1024)
def _read(file: Path, package: str, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """Return what is kept of a module, and the names that it imports; the file may change."""
    content = file.read_bytes()
    if file.suffix != ".py" or size > _LARGEST:
        return f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}", ()
    text = secrets.mask(content.decode(errors="replace"))
    try:
        return text, tuple(dict.fromkeys(_imports(ast.parse(content), package)))
    except _NO_TREE:  # the import will tell it
        return text, ()


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, anywhere in it; some may be no modules."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(names=names):
                base = imported(node, package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(called).rpartition(".")[2] in ("import_module", "__import__"):
                    yield name if not name.startswith(".") else f"{package}{name}"


def _change(old: Module | None, new: Module | None) -> str:
    """Return what has changed in a module; "" if nothing has."""
    if old is None or new is None:
        return "new" if old is None else "gone"
    same = old.text == new.text or _bare(old.text) == _bare(new.text)
    return "" if same else "changed"


def _bare(text: str) -> str:
    """Return a source without comments, docstrings and a layout of its own; or as it is."""
    try:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                match node.body:
                    case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                        node.body = rest or [ast.Pass()]
        return ast.unparse(tree)
    except _NO_TREE:
        return text
