"""The modules of the user that a process has imported, and how they differ from those of before.

    import my_net ── my_net.py ── import helper ── helper.py ── loaded() ── modules.json
    helper.py is edited ───────────────────────────────────────── on_disk() ── difference()

These are the modules in the folders that `git.code_folders` names. Installed packages and hpctrain
are recorded by their versions.

Comments, docstrings and the layout of the lines do not change what is trained, so they do not
count.
"""

import ast
import functools
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.base import secrets
from hpctrain.base.files.record import Record
from hpctrain.runs.code.git import code_folders

_LARGEST = 4 << 20  # bytes of a module whose text is kept
_NOT_USERS = ("hpctrain", "torch", "__main__")  # what is compiled is below `torch`
_INSTALLED = ("/site-packages/", "/dist-packages/")
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


def loaded(before: Collection[str], packages: Collection[str] = ()) -> dict[str, Module]:
    """Return the user's modules that are imported, by name, as their files are now.

    Those are left out that `sys.modules` had `before`, unless they are in one of the packages: a
    program that trains has modules of its own.
    """
    folders, found = search_path(), dict[str, Module]()
    for name, module in sorted(sys.modules.items()):
        file, package = getattr(module, "__file__", None) or "", name.partition(".")[0]
        if package in _NOT_USERS or (name in before and package not in packages):
            continue
        if any(part in file for part in _INSTALLED):
            continue
        path = Path(os.path.realpath(file))
        root = next((each for each in folders if file and path.is_relative_to(each)), None)
        if root is not None and (text := _text_of(path)) is not None:
            found[name] = Module(str(path.relative_to(root)), text)
    return found


def on_disk(
    known: Mapping[str, Module], folders: Sequence[Path] | None = None
) -> dict[str, Module]:
    """Return those of these modules whose files are there, as they are now.

    Python looks for them in these folders, or where this process does.
    """
    places, found = search_path() if folders is None else folders, dict[str, Module]()
    for name, module in known.items():
        texts = (_text_of(place / module.file) for place in places)
        if (text := next((each for each in texts if each is not None), None)) is not None:
            found[name] = Module(module.file, text)
    return found


def difference(before: Mapping[str, Module], now: Mapping[str, Module | None], since: str) -> str:
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


def _text_of(file: Path) -> str | None:
    with suppress(OSError):
        facts = file.stat()
        return _read(file, facts.st_mtime_ns, facts.st_size)
    return None


@functools.lru_cache(maxsize=1024)
def _read(file: Path, mtime_ns: int, size: int) -> str:
    """Return what is kept of a module; the file may change."""
    content = file.read_bytes()
    if file.suffix != ".py" or size > _LARGEST:
        return f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    return secrets.mask(content.decode(errors="replace"))


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
