"""Find the runs that a command line names: by a directory, the start of a name, or a folder."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import LARGEST_JSON
from hpctrain.base.files.record import read_bytes
from hpctrain.base.names.run_record import ListedRun, Submission
from hpctrain.base.terminal.terminal import few

SEARCH_FILE = "search.json"
"""The file that makes the folder of a sweep that of a search; `hpctrain.search` writes it."""

_ARCHIVED = re.compile(r"-[0-9a-f]{8}\.\d+$")


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the runs and their folder; `what` ends the help text: how many runs, or the default."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN|SWEEP",
        help="a run: its directory, its name or the start of its name; a sweep: its folder or the "
        "start of its date and time; or a folder of runs; " + what,
    )
    add_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_dir(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says where runs are that are given by name."""
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), metavar="DIR", help="output_dir (default: runs)"
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a run and one of its checkpoints."""
    parser.add_argument("run", metavar="RUN", help="its directory, its name or the start of it")
    add_dir(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="the step of the checkpoint (default: the newest)"
    )
    parser.add_argument("--best", action="store_true", help="take the best checkpoint")


def select(
    folder: Path, names: Sequence[str], archived: bool = False, several: bool = False
) -> list[Path]:
    """Return the run directories that are named, as distinct absolute paths; no name means all.

    With `archived` all runs include archived ones (`NAME.1`): old results of runs that were
    repeated. A name can always name an archived run. With `several` the start of several names
    means all of them; a command that changes runs needs one run or sweep. A name that is unknown,
    or ambiguous where one is needed, is a ConfigError.
    """
    if not names:
        return all_runs(folder, archived)
    named = (path for name in names for path in _find(folder, name, archived, several))
    found = ([path] if _is_run(path) else _present(path, folder) for path in named)
    return list(dict.fromkeys(chain.from_iterable(found)))


def one_sweep(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the folder of the sweep that is named; None if the names are of others, or several."""
    found = [path for name in names for path in _find(folder, name, archived=False, several=True)]
    return found[0] if len(found) == 1 and not _is_run(found[0]) else None


def one_run(folder: Path, name: str, command: str) -> Path:
    """Return the run that is named, for a command that takes one; a ConfigError names several."""
    paths = select(folder, [name])
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths[:5]) + ", ..." * (len(paths) > 5)
        raise ConfigError(f"{name}: {len(paths)} runs, and {command} takes one: {names or 'none'}")
    return paths[0]


def latest_run(folder: Path, name: str, command: str) -> Path:
    """Return the run that is named; of a search, the trial that has shown progress last."""
    sweep = one_sweep(folder, [name])
    if sweep is None or not is_search(sweep):
        return one_run(folder, name, command)
    if not (trials := list(_present(sweep, folder))):
        raise StorageError(f"{sweep}: no trial has begun; {sweep}/workers has the logs of workers")
    return newest(trials)


def is_search(sweep: Path) -> bool:
    """Return whether the folder of a sweep is that of a search."""
    return (sweep / SEARCH_FILE).is_file()


def searches_of(folder: Path) -> list[Path]:
    """Return the folders of all searches in `output_dir`, sorted by time."""
    return [sweep for sweep in _all_sweeps(folder) if is_search(sweep)]


def search_of(submission: Submission | None) -> Path | None:
    """Return the folder of the search of which a worker has trained a run last, or None."""
    folders = Path(submission.script).parents if submission else ()
    return folders[2] if len(folders) > 2 and is_search(folders[2]) else None


def newest(runs: Iterable[Path]) -> Path:
    """Return the run whose progress, or else whose record, was written last; one stat a run."""

    def written(run: Path) -> float:
        for name in ("progress.json", "run.json"):
            with suppress(OSError):
                return (run / name).stat().st_mtime
        return 0.0

    return max(runs, key=written)


def are_folders(names: Sequence[str]) -> bool:
    """Return whether each name is that of a folder of runs; such a name means "all", as --dir."""
    return bool(names) and all(map(_runs_in, names))


def _runs_in(name: str, archived: bool = False) -> list[Path]:
    """Return the runs in a folder of runs; none if it is a run, or if there is no such folder."""
    given = os.path.abspath(name)
    if not os.path.isdir(given) or _is_run(Path(given)):
        return []
    return all_runs(Path(given), archived)


def all_runs(folder: Path, archived: bool = True) -> list[Path]:
    """Return every run directory in `output_dir`, sorted by name; links are not followed."""
    try:
        with os.scandir(os.path.abspath(folder)) as entries:
            paths = sorted(
                entry.path
                for entry in entries
                if (archived or not _is_archived(entry.name))
                and entry.is_dir(follow_symlinks=False)
                and _is_run(Path(entry.path))
            )
    except OSError as error:
        raise StorageError(
            f"{folder}: no folder of runs ({error.strerror}); --dir says where they are"
        ) from error
    return [Path(path) for path in paths]


def _is_archived(name: str) -> bool:
    """Return whether a run of this name is archived."""
    return _ARCHIVED.search(name) is not None


def _all_sweeps(folder: Path) -> list[Path]:
    """Return the folders of all sweeps in `output_dir`, sorted by time."""
    try:
        return sorted(path for path in (folder / "sweeps").absolute().iterdir() if path.is_dir())
    except OSError:
        return []


def runs_of(sweep: Path) -> list[Path]:
    """Return the run directories of a sweep, in its order, whether they still exist or not."""
    try:
        return [Path(each.run) for each in ListedRun.of(sweep)]
    except FileNotFoundError:
        # The submission was interrupted or is in progress; the lists are written before the file.
        lists = sorted(sweep.glob("array-*/tasks"))
        texts = (read_bytes(path, 2, LARGEST_JSON)[0] for path in lists)
        listed = (os.fsdecode(line) for text in texts for line in text.split(b"\n"))
        return [*map(Path, filter(None, listed))]


def _find(folder: Path, name: str, archived: bool, several: bool) -> list[Path]:
    """Return the directories of the runs and sweeps of a name."""
    given = Path(os.path.abspath(name))
    of_sweep = ("sweep.json", "array-0/tasks", SEARCH_FILE)
    if _is_run(given) or any((given / file).is_file() for file in of_sweep):
        return [given]
    if inside := _runs_in(name, archived):
        return inside
    runs, sweeps = all_runs(folder), _all_sweeps(folder)
    known = {path.name: path for path in [*sweeps, *runs]}
    matching = [name]
    if name not in known:
        matching = [key for key in known if key.startswith(name)]
        # Archived runs count only if no other run matches.
        matching = [key for key in matching if not _is_archived(key)] or matching
        if not matching or (len(matching) > 1 and not several):
            raise ConfigError(_unclear(name, folder, matching, len(known)))
    return [known[key] for key in matching]


def _is_run(path: Path) -> bool:
    return os.path.lexists(path / "run.json")  # a run is damaged where that is no file


def _present(sweep: Path, folder: Path) -> Iterator[Path]:
    """Yield the runs of a sweep that still exist, even if `output_dir` was moved."""
    for path in runs_of(sweep):
        for place in (path, Path(os.path.abspath(folder)) / path.name):
            if _is_run(place):
                yield place
                break


def _unclear(name: str, folder: Path, matching: list[str], known: int) -> str:
    """Return the error message for a name that matches no run, or several."""
    if matching:
        return f"{name}: could be {few(matching)}; type more of it"
    if Path(name).is_dir():
        return f"{name}: this folder is no run and no sweep, and it holds no runs"
    return f"{name}: no run or sweep of that name in {folder}; it has {known} runs and sweeps"
