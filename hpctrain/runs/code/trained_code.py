"""The code that a run was trained with: the file `modules.json` of its directory.

    attempt 1 ── builds the model ── modules.json: my_net.py, helper.py
    attempt 3 ── my_net.py differs ─ said, recorded in run.json ── modules.json: my_net.py, too

    {"version": 1, "records": [{"attempt": 1, "modules": {"my_net": {"file": …, "text": …}}},
                               {"attempt": 3, "modules": {"my_net": {…}, "helper": null}}]}

A training depends on its config and on its code. The config decides the name of the run; so that a
run which failed by an error in the code can go on with better code, the code does not. Then it is
said what has changed. A record has only what differs from those before, and null for what is gone.

The modules are those in the folders that `provenance.code_folders` names; installed packages and
hpctrain are recorded by their versions. Comments, docstrings and the layout of the lines do not
change what is trained, so they do not count.
"""

import ast
import functools
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.base import secrets
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Count, Record, read_known, written
from hpctrain.base.names.run_record import RunRecord
from hpctrain.runs.code.provenance import code_folders
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
_LARGEST = 4 << 20  # bytes of a module whose text is kept
_NOT_USERS = ("hpctrain", "torch", "__main__")  # what is compiled is below `torch`
_INSTALLED = ("/site-packages/", "/dist-packages/")
_SHOWN = 3  # files
_NO_TREE = (SyntaxError, ValueError, RecursionError)  # no Python, or an expression of many parts
CHOICE = (
    "name=OTHER makes another run of the same config; train.from_scratch=true keeps this directory "
    "under another name and starts at step 0"
)


class Module(Record, frozen=True):
    """A module."""

    file: str  # the path in the folder that Python imports it from
    text: str  # its source, with `***` for secrets; of a compiled module, the digest of the file


class _Imported(Record, frozen=True):
    """The modules that an attempt has imported and the attempts before have not; None is gone."""

    attempt: Count
    modules: dict[str, Module | None]


class _File(Record, frozen=True):
    LARGEST, VERSION = 256 << 20, 1

    records: tuple[_Imported, ...]


def record(run: RunDir, called: Iterable[str], known: Collection[str]) -> None:
    """Note with which modules the last attempt trains, if they are others than before.

    `called` are the `_target_` of its config, and `known` the names of modules that the process had
    when its first training began.
    """
    records = _records(run.path)
    packages = {target.partition(".")[0] for target in called}
    now: dict[str, Module | None] = {**loaded(known, packages)}
    if records:
        now = _changed(_merged(records), now)
    if now:
        _write(run, [*records, _Imported(len(run.read().attempts), now)])


def _changed(
    before: Mapping[str, Module], imported: Mapping[str, Module | None]
) -> dict[str, Module | None]:
    """Return what a record must add to what was known before; nothing if the code is the same."""
    now: dict[str, Module | None] = {**on_disk(before), **imported}
    if not difference(before, now, ""):
        return {}
    changed = {name: module for name, module in now.items() if before.get(name) != module}
    return changed | dict.fromkeys(before.keys() - now.keys())


def inherit(parent: RunDir, run: RunDir, step: int) -> None:
    """Note the code of a parent's checkpoint, as if an attempt 0 of the run had made it."""
    last = _maker(parent.read(), step)
    if before := _merged([one for one in _records(parent.path) if one.attempt <= last]):
        _write(run, [_Imported(0, {**before})])


def changes(run: RunDir, folders: Sequence[Path] | None = None) -> str:
    """Return in one line how the code differs from that which made the checkpoints of a run.

    It is "" if nothing differs, or nothing is known, or nothing of an older training would go on.
    Modules are found as `on_disk` does.
    """
    if not (records := _records(run.path)):
        return ""
    content, step = run.read(), run.last_checkpoint()
    finished = content.state == "finished"
    maker = len(content.attempts) if finished else _maker(content, step)
    known = [one for one in records if one.attempt <= maker]
    if not known or not (step or finished):
        return ""
    before, attempt = _merged(known), known[-1].attempt
    since = f"attempt {attempt}" if attempt else "the branch"
    return difference(before, on_disk(before, folders), since)


def warn(run: RunDir) -> None:
    """Log a warning if the code of now is not that which has made the checkpoints of a run."""
    if changed := changes(run):
        log.warning("%s was trained with other code than that of now: %s", run.name, changed)


def turning_points(content: RunRecord) -> dict[int, str]:
    """Return the steps of the checkpoints from which a run went on with other code, and which."""
    return {
        one.first_step or 0: one.code_changed
        for one in content.attempts
        if one.code_changed and not one.misfit
    }


def _maker(content: RunRecord, step: int) -> int:
    """Return the number, from 1, of the attempt that made a checkpoint; 0 if a parent had it."""
    attempts, reached = content.attempts, step
    for number in range(len(attempts), 0, -1):
        first = attempts[number - 1].first_step or 0
        if first < reached:
            return number
        reached = min(reached, first)
    return 0


def _records(path: Path) -> list[_Imported]:
    file = read_known(_File, path / "modules.json")
    return list(file.records) if file else []


def _write(run: RunDir, records: Sequence[_Imported]) -> None:
    write_atomically(run.path / "modules.json", written(_File(records=tuple(records))))


def _merged(records: Sequence[_Imported]) -> dict[str, Module]:
    found: dict[str, Module | None] = {}
    for one in records:
        found |= one.modules
    return {name: each for name, each in found.items() if each}


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
