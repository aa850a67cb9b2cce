"""`python -m hpctrain gc`: list or delete what is not needed any more under `output_dir`.

Kinds of items:

    temporary    files of processes that have ended, half-written and half-deleted folders
    code         a code snapshot that no run uses
    environment  an archive of Python's packages that no job was submitted with for a month
    checkpoint   of a finished run, older than its newest complete one, and not the best

Nothing of a queued or running run is deleted, and links are never followed.
"""

import argparse
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, DamageError, StorageError
from hpctrain.base.files.disk import TEMPORARY
from hpctrain.base.names.step_names import step_name
from hpctrain.base.terminal.terminal import printable
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import add_dir, all_runs
from hpctrain.commands.state import UNDER_WAY, State, states_of
from hpctrain.launch.functions.function_call import code_of
from hpctrain.runs.checkpoints.manifest import OLD, Manifest, checkpoints, damage
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)

_YOUNG_S = 3600.0  # younger files may belong to a submission in progress
_UNUSED_S = 30 * 86400.0
_DOOMED = ".gc-"  # an item gets this prefix first: a half-deleted run must not look like a run


@dataclass
class Item:
    """Something that can be deleted."""

    kind: str  # one of the kinds in the table above
    path: Path  # a file or folder inside `output_dir`
    why: str  # why it is not needed, in a few words
    run: Path | None = None  # which is locked during the deletion; None if it belongs to no run
    size: int = 0  # bytes of all its files
    problem: str = ""  # why it could not be deleted


def main(argv: list[str]) -> int:
    """List the items, with --delete delete them; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain gc",
        description="List what can be deleted under output_dir, with sizes and reasons: temporary "
        "files, unused copies of the code and of environments, and old checkpoints of finished "
        "runs. Nothing is deleted without --delete. Queued and running runs are never touched.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="a folder of runs, as with --dir"
    )
    add_dir(parser)
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    options = parser.parse_args(argv)
    options.dir = options.folder or options.dir
    if (options.dir / "run.json").exists() or (options.dir / "sweep.json").exists():
        raise ConfigError(f"{options.dir}: gc looks through a folder of runs, and this is one run")
    items = list(find(options.dir))
    for item in items:
        item.size = _size(item.path)
    for item in items if options.delete else ():
        item.problem = _delete(item)
    _print(items, deleted=options.delete)
    if problems := sum(bool(item.problem) for item in items):
        raise StorageError(f"{problems} of {len(items)} could not be deleted")
    return 0


def find(output_dir: Path) -> Iterator[Item]:
    """Yield everything that can be deleted, by kind."""
    folder = Path(os.path.abspath(output_dir))
    now = time.time()
    found = states_of(all_runs(folder))
    runs, states = [run for run, _ in found], {run.path: state for run, state in found}
    for run in runs:
        if run.damage:
            log.warning("%s; it is left as it is, and so are the copies of the code", run.damage)
    rest = [run for run in runs if _is_at_rest(run, states[run.path])]
    yield from _temporary(folder, rest, now)
    yield from _code(folder, runs, now)
    for entry in _entries(folder / offered.environment.FOLDER):
        # A job that still waits for it then starts from the shared file system, and says so.
        if not entry.name.startswith(".") and (age := _age(entry, now)) > _UNUSED_S:
            yield Item("environment", Path(entry.path), f"not used for {age / 86400:.0f} days")
    for run in rest:
        if states[run.path].name == "finished":
            yield from _checkpoints(run)


def _is_at_rest(run: Facts, state: State) -> bool:
    """Return whether it is certain that no job has the run in use or will start soon."""
    unknown = run.submission and not run.is_final and not run.scheduler
    return state.name not in (*UNDER_WAY, "damaged") and not unknown


def _temporary(folder: Path, rest: list[Facts], now: float) -> Iterator[Item]:
    """Yield files that killed processes have left while they wrote or deleted something."""
    names = ("", "code", "sweeps", offered.environment.FOLDER)
    shared = [(folder / name, None) for name in names]
    inside = [(place, run.path) for run in rest for place in (run.path, run.path / "checkpoints")]
    for place, run in [*shared, *inside]:
        for entry in _entries(place):
            match = TEMPORARY.match(entry.name)
            if entry.name.startswith(_DOOMED):
                yield Item("temporary", Path(entry.path), "half deleted by gc", run)
            elif match and _age(entry, now) > _YOUNG_S:
                why = f"left by process {match['pid']} on {match['host']}"
                yield Item("temporary", Path(entry.path), why, run)
            elif run and place.name == "checkpoints" and _is_left(Path(entry.path)):
                # Only the process that holds the lock of the run writes one; no process holds it.
                yield Item("temporary", Path(entry.path), "the save was interrupted", run)


def _is_left(path: Path) -> bool:
    return path.suffix == ".tmp" or (path.suffix == OLD and path.with_suffix("").exists())


def _code(folder: Path, runs: list[Facts], now: float) -> Iterator[Item]:
    used = {code_of(Path(entry.path)) for entry in _entries(folder / "functions")}
    for run in runs:
        if run.damage:
            return  # a run without a readable config may use any snapshot
        used |= {run.record.code or "", *(attempt.code for attempt in run.record.attempts)}
    for entry in _entries(folder / "sweeps"):
        try:
            # Its workers wait, or train trials of other code.
            used.add(offered.trials.code_of(Path(entry.path)))
        except DamageError:
            return  # it may use any snapshot, too
    for entry in _entries(folder / "code"):
        if entry.name.startswith(".") or _age(entry, now) < _YOUNG_S:
            continue
        if entry.name not in used:
            yield Item("code", Path(entry.path), "no run uses it")


def _checkpoints(run: Facts) -> Iterator[Item]:
    if (run.path / "evaluations" / "recorded").is_dir():
        return  # jobs of an older version chose the best by these results, and run.json has none
    folder, newest = run.path / "checkpoints", False
    best = step_name(run.record.best.step if run.record.best else 0)
    for path in () if folder.is_symlink() else checkpoints(folder):
        if path.name == best:
            continue
        if not newest:
            # It is healthy, and every file exists and has the size of the manifest.
            newest = not damage(path, digests=False) and Manifest.read(path).healthy
        else:
            yield Item("checkpoint", path, "the run is finished; one is newer", run.path)


def _delete(item: Item) -> str:
    """Delete the item; return the problem, or "" if there was none."""
    try:
        with ExitStack() as stack:
            if item.run is not None:
                stack.enter_context(RunDir(item.run).lock())
                if Facts.read(item.run).recorded_state in ("queued", "running"):
                    return "its run was submitted or started meanwhile"
            doomed = item.path
            if not item.path.name.startswith(_DOOMED):
                doomed = item.path.with_name(_DOOMED + item.path.name)
                item.path.rename(doomed)
            if doomed.is_dir() and not doomed.is_symlink():
                shutil.rmtree(doomed)
            else:
                doomed.unlink()
    except StorageError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or item.path}: {error.strerror}"
    return ""


def _age(entry: os.DirEntry[str], now: float) -> float:
    return now - entry.stat(follow_symlinks=False).st_mtime


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, by name; none if it does not exist or is a link."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _size(path: Path) -> int:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    with os.scandir(path) as entries:
        return sum(_size(Path(entry.path)) for entry in entries)


def _print(items: list[Item], *, deleted: bool) -> None:
    for item in items:
        where = printable(os.path.relpath(item.path))
        print(f"{item.kind:<12}{decimal(item.size):>9}  {where}  ({printable(item.why)})")
        if item.problem:
            print(f"  not deleted: {printable(item.problem)}", file=sys.stderr)
    done = [item.size for item in items if not item.problem]
    if not items:
        print("nothing to delete")
    elif deleted:
        print(f"deleted: {len(done)}, {decimal(sum(done))} freed")
    else:
        print(f"{len(items)} items, {decimal(sum(done))}; nothing was deleted: add --delete")
