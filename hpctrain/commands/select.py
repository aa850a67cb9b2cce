"""Which runs are meant: all, a directory, a name or the beginning of one, a sweep."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpctrain.errors import ConfigError, StorageError

_ARCHIVED = re.compile(r"-[0-9a-f]{8}\.\d+$")


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """What every command takes: the runs, and where they are."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN|SWEEP",
        help="a run directory, its name or the beginning of it, a sweep's folder or its time; "
        + what,
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), metavar="DIR", help="output_dir (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def select(folder: Path, names: Sequence[str], archived: bool = False) -> list[Path]:
    """The run directories that are meant, absolute, each once.

    Args:
        folder: `output_dir`.
        names: as typed; none means all.
        archived: with those that were set aside when the run was made again (`NAME.1`); one that
            is named is always meant.

    Raises:
        ConfigError: a name is unknown or could be several.
        StorageError: there is no such folder.
    """
    if not names:
        return all_runs(folder, archived)
    found = (path for name in names for path in _find(folder, name))
    return list(dict.fromkeys(found))


def all_runs(folder: Path, archived: bool = True) -> list[Path]:
    """Every run directory in `output_dir`, by name; links are not followed."""
    try:
        with os.scandir(os.path.abspath(folder)) as entries:
            paths = sorted(
                entry.path
                for entry in entries
                if (archived or not is_archived(entry.name))
                and entry.is_dir(follow_symlinks=False)
                and os.path.exists(f"{entry.path}/run.json")
            )
    except OSError as error:
        raise StorageError(
            f"{folder}: no folder of runs ({error.strerror}); --dir says where they are"
        ) from error
    return [Path(path) for path in paths]


def is_archived(name: str) -> bool:
    """Whether a run of this name was set aside."""
    return _ARCHIVED.search(name) is not None


def all_sweeps(folder: Path) -> list[Path]:
    """The folders of sweeps in `output_dir`, by time."""
    try:
        return sorted(path for path in (folder / "sweeps").absolute().iterdir() if path.is_dir())
    except OSError:
        return []


def runs_of(sweep: Path) -> list[Path]:
    """The run directories of a sweep, in its order, whether they are still there or not."""
    try:
        entries = json.loads((sweep / "sweep.json").read_text())
        return [Path(entry["run"]) for entry in entries]
    except FileNotFoundError:
        # The submission was cut off, or goes on: the links were made before.
        links = sorted(sweep.glob("array-*/tasks/*"), key=lambda p: (p.parent, int(p.name)))
        return [Path(os.readlink(link)) for link in links]
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{sweep}/sweep.json is damaged ({error!r})") from error


def _find(folder: Path, name: str) -> Iterable[Path]:
    given = Path(os.path.abspath(name))
    if (given / "run.json").is_file():
        return [given]
    if _is_sweep(given):
        return _present(given, folder)
    runs, sweeps = all_runs(folder), all_sweeps(folder)
    known = {path.name: path for path in [*sweeps, *runs]}
    if name in known:
        match = known[name]
    else:
        begun = [key for key in known if key.startswith(name)]
        # One that was set aside is meant only where nothing else is.
        begun = [key for key in begun if not is_archived(key)] or begun
        if len(begun) != 1:
            raise ConfigError(_unclear(name, folder, begun, list(known)))
        match = known[begun[0]]
    return _present(match, folder) if match in sweeps else [match]


def _is_sweep(path: Path) -> bool:
    return (path / "sweep.json").is_file() or (path / "array-0" / "tasks").is_dir()


def _present(sweep: Path, folder: Path) -> Iterator[Path]:
    """A sweep's runs that are still there; `output_dir` may have moved since."""
    for path in runs_of(sweep):
        for place in (path, Path(os.path.abspath(folder)) / path.name):
            if (place / "run.json").is_file():
                yield place
                break


def _unclear(name: str, folder: Path, begun: list[str], known: list[str]) -> str:
    if begun:
        some = ", ".join(begun[:5]) + (f" and {len(begun) - 5} more" if len(begun) > 5 else "")
        return f"{name}: could be {some}; type more of it"
    if Path(name).is_dir():
        return f"{name}: a folder, but neither a run nor a sweep; --dir {name} if it holds runs"
    # Compared with as much of each name as was typed.
    near = difflib.get_close_matches(name, [key[: len(name)] for key in known], n=3)
    meant = [key for key in known if key[: len(name)] in near][:3]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"{len(known)} runs and sweeps there"
    return f"{name}: no run or sweep of that name in {folder}; {hint}"
