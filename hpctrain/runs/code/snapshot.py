"""The code snapshot: a copy of the code, so that later edits do not change queued jobs.

    runs/code/3fa92c1be0d44c12/      the name is a digest of the content; a sweep has one snapshot
        my_project/…                 each working tree that Python imports from
        installed/hpctrain/…         this package, if it is installed and not in a working tree
        pythonpath.json              the folders in the snapshot that Python imports from

Not copied, also where no .gitignore names them, are results (runs, sweeps, snapshots, MLflow's
store), data sets, and large files, unless git tracks them. Files that hold secrets by custom (.env,
private keys; `hpctrain.runs.code.private_files`) are never copied. A copy has no permission that
its file does not have.

Bytecode that Python has made of the copied files is copied, too; it is no part of the digest.

In a job these folders are at the front of PYTHONPATH. Installed packages are not copied because
they have gigabytes. Their versions are recorded, and the job logs when they have changed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from hpctrain import secrets
from hpctrain.config.schema import LaunchConfig
from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.record import read
from hpctrain.runs.code.copied_file import CopiedFile, Source
from hpctrain.runs.code.git import Repo, code_folders, repositories
from hpctrain.runs.code.private_files import is_private

log = logging.getLogger(__name__)
_PATHS = "pythonpath.json"
_LARGE = 10e6  # bytes of a file that is no code, unless git tracks it
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Snapshot:
    """A code snapshot. `take` reads the files into memory; `write` writes them."""

    digest: str
    path: Path  # the folder of the snapshot, which need not exist yet
    # The folders that Python imports from, in order: folders in the snapshot, and at the end the
    # working directory if it is in no git repository.
    pythonpath: tuple[Path, ...]
    # Folders with code that are in no git repository, so they are not copied.
    unfrozen: tuple[Path, ...]
    _files: dict[str, CopiedFile] = field(repr=False)
    # A line for each folder and large file that is taken for no code.
    left_out: tuple[str, ...] = ()
    telling: tuple[str, ...] = ()  # a line for each file of the copy that has a secret in it

    @classmethod
    def load(cls, path: Path) -> Snapshot | None:
        """Return the snapshot in a folder, without its files; None if it does not exist."""
        try:
            folders = read(tuple[str, ...], path / _PATHS, parts=2)
        except FileNotFoundError:
            return None
        # `path / folder` is `folder` if that is absolute.
        return cls(path.name, path, tuple(path / folder for folder in folders), (), {})

    def write(self) -> bool:
        """Write the folder, completely or not at all; return False if it exists already."""
        if self.path.is_dir():
            self.path.touch()  # `gc` does not delete young folders
            return False
        unfinished = temporary(self.path)
        try:
            for name, file in self._files.items():
                file.write(unfinished / name)
            folders = [
                str(folder.relative_to(self.path) if self.path in folder.parents else folder)
                for folder in self.pythonpath
            ]
            (unfinished / _PATHS).write_text(json.dumps(folders) + "\n")
            unfinished.replace(self.path)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not self.path.is_dir():  # if it is there, another process has written it
                raise StorageError(
                    f"launch.snapshot: cannot write {self.path} ({error.strerror})"
                ) from error
        return True


def take(launch: LaunchConfig, output_dir: str, data_path: str) -> Snapshot | None:
    """Read the code that a job runs; None with `launch.snapshot=off`.

    Nothing is written, and the two folders are left out. Code that is too large, or with
    `launch.snapshot=git` cannot be read by git, is a ConfigError; a file that cannot be read is a
    StorageError.
    """
    if launch.snapshot == "off":
        return None
    require_git = launch.snapshot == "git"
    repos, outside = repositories(code_folders())
    if require_git and Path.cwd() in outside:
        raise ConfigError(
            f"launch.snapshot=git: {Path.cwd()} is in no git repository (use git init; or "
            "launch.snapshot=auto, which copies only code in repositories; or launch.snapshot=off)"
        )
    used = [folder for repo in repos for folder in repo.used]
    reader = _Reader(launch.snapshot_max_mb, [Path(output_dir), Path(data_path)], used)
    for repo in repos:
        try:
            reader.read_repository(repo)
        except ConfigError as error:
            if require_git:
                raise
            outside += repo.used
            log.warning("%s", error)
    reader.read_package()
    reader.check()
    copied = reader.imported()
    # Python still imports from the working directory, and from the folder of a program that calls
    # hpctrain, if they could not be copied.
    places = {Path.cwd(), *map(Path, map(os.path.realpath, sys.path[:1]))}
    here = [folder for folder in outside if folder in places]
    digest = _digest(reader.files, [*copied, *map(str, here)])
    path = Path(output_dir) / "code" / digest
    # The user is not told about folders without modules.
    unfrozen = (f for f in outside if any(f.glob("*.py")) or any(f.glob("*/__init__.py")))
    imported = (*(path / folder for folder in copied), *here)
    told = reader.left_out(), tuple(_telling(reader.files))
    return Snapshot(digest, path, imported, tuple(unfrozen), reader.files, *told)


def _telling(files: Mapping[str, CopiedFile]) -> Iterator[str]:
    """Yield a line for each file that has a secret of the environment, or a token, in it.

    Code cannot be masked, so its owner is told.
    """
    values = {value.encode(): name for value, name in secrets.known().items()}
    for path, file in files.items():
        if len(file.content) > _LARGE or path.startswith("installed/"):
            continue
        names = sorted({name for value, name in values.items() if value in file.content})
        found = [f"the value of {name}" for name in names]
        if not found and any(start in file.content for start in secrets.TOKEN_STARTS):
            looks = next(secrets.tokens(file.content.decode("latin-1")), "")
            found = [f"what looks like a token, {looks[:8]}…"] if looks else []
        if found:
            yield f"{path} has {', '.join(found)} in it; say os.environ[NAME] in its place"


def _digest(files: dict[str, CopiedFile], imported: list[str]) -> str:
    hashed = xxhash.xxh3_128("\0".join(imported).encode("utf-8", "surrogateescape"))
    for path, file in sorted(files.items()):
        for part in (os.fsencode(path), file.identity.encode(), file.content):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:16]


class _Reader:
    """Reads the files of a snapshot. Over the size limit it only adds up their sizes."""

    def __init__(self, limit_mb: float, left_out: list[Path], used: list[Path]) -> None:
        self.files: dict[str, CopiedFile] = {}
        self._folders: list[str] = []
        self._has_package = False
        self._limit = limit_mb * 1e6
        self._sizes: dict[str, int] = {}
        self._total = 0
        # The working tree may contain results and data that are not ignored: leave these out. But
        # if the code itself is inside such a folder, the folder must not be left out.
        self._not_code = [
            place for place in left_out if not any(folder.is_relative_to(place) for folder in used)
        ]
        self._no_code: dict[tuple[str, Path], list[int]] = {}  # reason and place: bytes of files
        self._reason = functools.cache(_reason)

    def read_repository(self, repo: Repo) -> None:
        """Read the files of a working tree."""
        self._read_all(repo.name, repo.root, repo.files())
        inside = [os.path.relpath(folder, repo.root) for folder in repo.used]
        self._folders += [os.path.normpath(os.path.join(repo.name, folder)) for folder in inside]
        # `files` does not have this package if it is installed in an ignored .venv of the tree.
        if PACKAGE.is_relative_to(repo.root):
            module = f"{repo.name}/{PACKAGE.relative_to(repo.root)}/__init__.py"
            self._has_package |= module in self.files

    def read_package(self) -> None:
        """Read the installed files of this package, unless it was in a working tree."""
        if not self._has_package:
            modules = sorted(
                str(file.relative_to(PACKAGE.parent))
                for file in PACKAGE.rglob("*")
                if file.suffix in (".py", ".sh", ".yaml")
            )
            self._read_all("installed", PACKAGE.parent, dict.fromkeys(modules, True))
            self._folders.append("installed")

    def imported(self) -> list[str]:
        """Return the folders in the snapshot that Python imports from, in order."""
        has = {folder for path in self.files for folder in _parents(path)}
        return [folder for folder in dict.fromkeys(self._folders) if folder in has]

    def left_out(self) -> tuple[str, ...]:
        """Return a line for each folder and large file that is taken for no code."""
        return tuple(
            f"{place} ({len(sizes):,} {'file' if len(sizes) == 1 else 'files'}, "
            f"{sum(sizes) / 1e6:,.1f} MB): {reason}"
            for (reason, place), sizes in self._no_code.items()
        )

    def _is_no_code(self, full: Path, root: Path) -> bool:
        """Return whether a file that git does not track is a result, of a data set, or large."""
        found: tuple[str, Path] | None = None
        for folder in (folder for folder in full.parents if folder.is_relative_to(root)):
            if reason := self._reason(folder):
                # The runs of a folder are told together.
                found = reason, folder if reason == _DATA else folder.parent
        try:
            size = full.lstat().st_size
        except OSError:
            return False
        if found is None and full.name.startswith("mlflow.db"):
            found = _RESULTS, full
        if found is None and size > _LARGE:
            found = f"above {_LARGE / 1e6:g} MB; `git add` it if the code needs it", full
        if found is not None:
            self._no_code.setdefault(found, []).append(size)
        return found is not None

    def _read_all(self, name: str, root: Path, paths: Mapping[str, bool]) -> None:
        for path, is_tracked in paths.items():
            full = root / path
            if any(full.is_relative_to(folder) for folder in self._not_code):
                continue
            if is_private(full) and full.exists():
                self._no_code.setdefault((_PRIVATE, full), []).append(full.lstat().st_size)
                continue
            if not is_tracked and (full.suffix == ".pyc" or self._is_no_code(full, root)):
                continue  # bytecode goes along with its module, see CopiedFile
            if any(f"{name}/{folder}" in self.files for folder in _parents(path)):
                continue  # tracked, but its folder is a link now
            try:
                self._read(full, f"{name}/{path}", root)
            except (FileNotFoundError, NotADirectoryError):
                continue  # tracked, but deleted
            except OSError as error:
                raise StorageError(f"launch.snapshot: {full}: {error.strerror}") from error

    def _read(self, full: Path, path: str, root: Path) -> None:
        facts = full.lstat()
        if stat.S_ISLNK(facts.st_mode):
            target = os.readlink(full)
            end = os.path.normpath(full.parent / target)
            # A relative link that leads out of the tree would have another target in the snapshot.
            target = target if Path(end).is_relative_to(root) else end
            self.files[path] = CopiedFile(os.fsencode(target), stat.S_IFLNK)
        elif stat.S_ISREG(facts.st_mode):
            self._sizes[str(full)] = facts.st_size
            self._total += facts.st_size
            # Over the limit, only the sizes are needed for the error message.
            if self._total <= self._limit:
                mode, module = facts.st_mode, None
                if full.suffix == ".py":
                    module = Source(full, facts.st_mtime, facts.st_size)
                content = full.read_bytes()
                self.files[path] = CopiedFile(content, stat.S_IXUSR & mode, mode & 0o044, module)

    def check(self) -> None:
        """Raise ConfigError if the files are over the size limit."""
        if self._total <= self._limit:
            return
        largest = sorted(self._sizes.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{path} {size / 1e6:.0f} MB" for path, size in largest)
        raise ConfigError(
            f"launch.snapshot_max_mb={self._limit / 1e6:g}: the code has {len(self._sizes):,} "
            f"files of {self._total / 1e6:,.0f} MB (largest: {shown}); list files that are no code "
            "in .gitignore, raise the limit, or set launch.snapshot=off"
        )


_RESULTS, _DATA = "results of runs", "a data set"
_PRIVATE = "it may hold secrets; export the variables that the code needs, jobs inherit them"


def _reason(folder: Path) -> str:
    """Return why a folder has no code; "" if it may have some."""
    name = f"{folder.parent.name}/{folder.name}"
    if re.fullmatch(r"sweeps/\d{4}-.*|functions/\d{4}-.*|code/\.?[0-9a-f]{16}", name):
        return _RESULTS
    if re.search(r"-[0-9a-f]{8}(\.\d+)?$", name) and (folder / "run.json").exists():
        return _RESULTS
    if (folder / "index.json").exists() and next(folder.glob("*.h5"), None) is not None:
        return _DATA
    return ""


def _parents(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path
