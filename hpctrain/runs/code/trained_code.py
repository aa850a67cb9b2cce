"""The code that a run was trained with: the file `modules.json` of its directory.

    an attempt begins ── modules.json: {"version": 1, "digests": {"my_net.py": …, "helper.py": …}}
    the next one ─────── helper.py differs ── said, recorded in run.json

A training depends on its config and on its code. The config decides the name of the run; so that a
run which failed by an error in the code can go on with better code, the code does not. Then it is
said what has changed; `provenance/` has the commit and the patch.

The modules are those in the folders that `provenance.code_folders` names; installed packages and
hpctrain are recorded by their versions.
"""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Record, read_known, written
from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.terminal.terminal import few
from hpctrain.runs.checkpoints.manifest import digest
from hpctrain.runs.code.provenance import code_folders
from hpctrain.runs.run_dir import RunDir

_NOT_USERS = ("hpctrain", "torch", "__main__")  # what is compiled is below `torch`
_INSTALLED = ("/site-packages/", "/dist-packages/")
_SHOWN = 3  # files
CHOICE = (
    "name=OTHER makes another run of the same config; train.from_scratch=true keeps this directory "
    "under another name and starts at step 0"
)


class _File(Record, frozen=True):
    VERSION = 1

    # By the path in the folder that Python imports from; files of before have texts in their place.
    digests: dict[str, str] = msgspec.field(default_factory=dict)


def record(run: RunDir, called: Iterable[str], known: Collection[str]) -> None:
    """Note with which modules the last attempt trains.

    `called` are the `_target_` of its config, and `known` the names of modules that the process had
    when its first training began.
    """
    now = loaded(known, {target.partition(".")[0] for target in called})
    if now and now != _digests(run):
        write_atomically(run.path / "modules.json", written(_File(digests=now)))


def inherit(parent: RunDir, run: RunDir) -> None:
    """Note the code of a parent, of which the run has a checkpoint."""
    if before := _digests(parent):
        write_atomically(run.path / "modules.json", written(_File(digests=before)))


def changes(run: RunDir, folders: Sequence[Path] | None = None) -> str:
    """Return in one line how the code differs from that with which a run was trained last.

    It is "" if nothing differs, or nothing is known, or nothing of an older training would go on.
    Modules are found in these folders, or where this process imports from.
    """
    before = _digests(run)
    if not before or not (run.last_checkpoint() or run.read().state == "finished"):
        return ""
    places = search_path() if folders is None else folders
    now = {file: _digest(file, places) for file in before}
    told = (
        f"{file} {'has changed' if now[file] else 'is gone'}"
        for file in sorted(before)
        if now[file] != before[file]
    )
    return few(told, _SHOWN, "; ")


def turning_points(content: RunRecord) -> dict[int, str]:
    """Return the steps of the checkpoints from which a run went on with other code, and which."""
    return {
        one.first_step or 0: one.code_changed
        for one in content.attempts
        if one.code_changed and not one.misfit
    }


def _digests(run: RunDir) -> dict[str, str]:
    file = read_known(_File, run.path / "modules.json")
    return file.digests if file else {}


def _digest(file: str, places: Iterable[Path]) -> str:
    """Return the digest of the first such file; "" if there is none."""
    for place in places:
        with suppress(OSError):
            return digest(place / file)
    return ""


def search_path() -> list[Path]:
    """Return the folders of the user that this process imports from, in Python's order."""
    folders = code_folders()
    known = set(folders)
    imports = (Path(place or ".").resolve() for place in sys.path)
    first = [folder for folder in dict.fromkeys(imports) if folder in known]
    # With PYTHONSAFEPATH, as in a job with a copy of the code, the working directory is no place.
    return first + [each for each in folders if each not in first and each != Path.cwd()]


def loaded(before: Collection[str], packages: Collection[str] = ()) -> dict[str, str]:
    """Return the digest of each of the user's modules that are imported, by its file.

    Those are left out that `sys.modules` had `before`, unless they are in one of the packages: a
    program that trains has modules of its own.
    """
    folders, found = search_path(), dict[str, str]()
    for name, module in sorted(sys.modules.items()):
        file, package = getattr(module, "__file__", None) or "", name.partition(".")[0]
        if package in _NOT_USERS or (name in before and package not in packages):
            continue
        if not file or any(part in file for part in _INSTALLED):
            continue
        path = Path(os.path.realpath(file))
        root = next((each for each in folders if path.is_relative_to(each)), None)
        if root is not None and (value := _digest(str(path.relative_to(root)), [root])):
            found[str(path.relative_to(root))] = value
    return found
