"""The code snapshot: a copy of the code, so that later edits do not change queued jobs.

    runs/code/3fa92c1be0d44c12/      the name is a digest of the content; a sweep has one snapshot
        my_project/…                 each working tree that Python imports from
        installed/hpctrain/…         this package, if it is installed and not in a working tree
        pythonpath.json              the folders in the snapshot that Python imports from

A working tree gives the files that git tracks, and new ones that it does not ignore. `output_dir`
and `data.path`, new files that are large, and files that hold secrets by custom (.env, private
keys; `hpctrain.runs.code.private_files`) are not copied. A copy has no permission that its file
does not have.

In a job these folders are at the front of PYTHONPATH. Installed packages are not copied because
they have gigabytes. Their versions are recorded, and the job logs when they have changed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from hpctrain.config.schema import LaunchConfig
from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.record import read
from hpctrain.runs.code.git import Repo, code_folders, repositories
from hpctrain.runs.code.private_files import is_private

log = logging.getLogger(__name__)
_PATHS = "pythonpath.json"
_LARGE = 10e6  # bytes of a file that is no code, unless git tracks it
_LARGEST = 50e6  # bytes of a copy of the code
PACKAGE = Path(__file__).resolve().parents[2]


class _File(NamedTuple):
    """A file of a snapshot, in memory."""

    content: bytes  # of a link: its target
    mode: int  # type of a link; of a file, who may read and execute it

    def write(self, path: Path) -> None:
        """Write the copy, which is read-only, because other runs use it too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(self.mode):
            path.symlink_to(os.fsdecode(self.content))
            return
        # Others must not read it meanwhile. The umask takes away more.
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode | stat.S_IWUSR)
        with open(opened, "wb") as file:
            file.write(self.content)
        path.chmod(path.stat().st_mode & 0o555)


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
    _files: dict[str, _File] = field(repr=False)
    left_out: tuple[str, ...] = ()  # a line for each file that may hold secrets, or is large

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
    results, others = Path(output_dir), [Path(output_dir), Path(data_path)]
    # If the code itself is inside such a folder, only the results in it are left out.
    others = [place for place in others if not any(each.is_relative_to(place) for each in used)]
    if results not in others:
        others += [results / "code", results / "sweeps", results / "functions"]
        others += [*results.glob("mlflow*"), *(file.parent for file in results.glob("*/run.json"))]
    reader, folders = _Reader(others), list[str]()
    for repo in repos:
        try:
            reader.read(repo.name, repo.root, repo.files())
        except ConfigError as error:
            if require_git:
                raise
            outside += repo.used
            log.warning("%s", error)
        else:
            folders += _inside(repo)
    if not reader.has_package:
        installed = (file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".sh", ".yaml"))
        names = sorted(str(file.relative_to(PACKAGE.parent)) for file in installed)
        reader.read("installed", PACKAGE.parent, dict.fromkeys(names, True))
        folders.append("installed")
    reader.check()
    has = {folder for path in reader.files for folder in _parents(path)}
    copied = [folder for folder in dict.fromkeys(folders) if folder in has]
    # Python still imports from the working directory, and from the folder of a program that calls
    # hpctrain, if they could not be copied.
    places = {Path.cwd(), *map(Path, map(os.path.realpath, sys.path[:1]))}
    here = [folder for folder in outside if folder in places]
    digest = _digest(reader.files, [*copied, *map(str, here)])
    path = Path(output_dir) / "code" / digest
    # The user is not told about folders without modules.
    unfrozen = (f for f in outside if any(f.glob("*.py")) or any(f.glob("*/__init__.py")))
    imported = (*(path / folder for folder in copied), *here)
    return Snapshot(digest, path, imported, tuple(unfrozen), reader.files, tuple(reader.left_out))


def _digest(files: Mapping[str, _File], imported: list[str]) -> str:
    hashed = xxhash.xxh3_128("\0".join(imported).encode("utf-8", "surrogateescape"))
    for path, file in sorted(files.items()):
        for part in (os.fsencode(path), str(file.mode).encode(), file.content):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:16]


class _Reader:
    """Reads the files of a snapshot. Over the size limit it only adds up their sizes."""

    def __init__(self, others: list[Path]) -> None:
        self.files: dict[str, _File] = {}
        self.left_out: list[str] = []
        self.has_package = False
        self._others, self._sizes, self._total = others, dict[str, int](), 0

    def read(self, name: str, root: Path, paths: Mapping[str, bool]) -> None:
        """Read files below a root into the folder `name`; True are those that git tracks."""
        for path, is_tracked in paths.items():
            full = root / path
            if any(full.is_relative_to(folder) for folder in self._others):
                continue
            if not is_tracked and full.suffix == ".pyc":
                continue
            if any(f"{name}/{folder}" in self.files for folder in _parents(path)):
                continue  # tracked, but its folder is a link now
            try:
                self._read(full, f"{name}/{path}", root, is_tracked)
            except (FileNotFoundError, NotADirectoryError):
                continue  # tracked, but deleted
            except OSError as error:
                raise StorageError(f"launch.snapshot: {full}: {error.strerror}") from error
            self.has_package |= full == PACKAGE / "__init__.py"

    def _read(self, full: Path, path: str, root: Path, is_tracked: bool) -> None:
        facts = full.lstat()
        if is_private(full):
            self.left_out.append(f"{full}: it may hold secrets; jobs inherit exported variables")
        elif not is_tracked and facts.st_size > _LARGE:
            size = f"{facts.st_size / 1e6:,.0f} MB"
            self.left_out.append(f"{full} ({size}): `git add` it if the code needs it")
        elif stat.S_ISLNK(facts.st_mode):
            target = os.readlink(full)
            end = os.path.normpath(full.parent / target)
            # A relative link that leads out of the tree would have another target in the snapshot.
            target = target if Path(end).is_relative_to(root) else end
            self.files[path] = _File(os.fsencode(target), stat.S_IFLNK)
        elif stat.S_ISREG(facts.st_mode):
            self._sizes[str(full)] = facts.st_size
            self._total += facts.st_size
            # Over the limit, only the sizes are needed for the error message.
            if self._total <= _LARGEST:
                self.files[path] = _File(full.read_bytes(), 0o400 | facts.st_mode & 0o155)

    def check(self) -> None:
        """Raise ConfigError if the files are over the size limit."""
        if self._total <= _LARGEST:
            return
        largest = sorted(self._sizes.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{path} {size / 1e6:.0f} MB" for path, size in largest)
        raise ConfigError(
            f"launch.snapshot: a copy of the code has at most {_LARGEST / 1e6:g} MB, and this one "
            f"{self._total / 1e6:,.0f} MB in {len(self._sizes):,} files (largest: {shown}); list "
            "files that are no code in .gitignore, or set launch.snapshot=off"
        )


def _inside(repo: Repo) -> Iterator[str]:
    """Yield the folders of a snapshot that Python imports from for a working tree."""
    for folder in repo.used:
        yield os.path.normpath(os.path.join(repo.name, os.path.relpath(folder, repo.root)))


def _parents(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path
