"""The code snapshot: a copy of the code, so that later edits do not change queued jobs.

    runs/code/3fa92c1be0d44c12/      the name is a digest of the content; a sweep has one snapshot
        my_project/…                 each working tree that Python imports from
        installed/hpctrain/…         this package, if it is installed and not in a working tree
        pythonpath.json              the folders in the snapshot that Python imports from

A working tree gives the files that git tracks, and new ones that it does not ignore. `output_dir`
and `data.path`, new files that are large, and files that hold secrets by custom (.env, private
keys; `provenance.is_private`) are not copied, nor are repositories inside that are no submodules. A
copy has no permission that its file does not have.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import temporary
from hpctrain.base.files.record import read
from hpctrain.config.schema import LaunchConfig
from hpctrain.runs.code.provenance import Repo, code_folders, is_private, repositories

log = logging.getLogger(__name__)
_PATHS = "pythonpath.json"
_LARGE = 10e6  # bytes of a file that is no code, unless git tracks it
_LARGEST = 50e6  # bytes of a copy of the code
PACKAGE = Path(__file__).resolve().parents[2]


class _File(NamedTuple):
    """A file of a snapshot, in memory."""

    content: bytes  # of a link: its target
    mode: int  # type of a link; of a file, who may read and execute it

    @classmethod
    def of(cls, path: Path, root: Path) -> _File:
        """Read a file below a root."""
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            return cls(path.read_bytes(), 0o400 | mode & 0o155)
        target = os.readlink(path)
        end = os.path.normpath(path.parent / target)
        # A relative link that leads out of the tree would have another target in the snapshot.
        target = target if Path(end).is_relative_to(root) else end
        return cls(os.fsencode(target), stat.S_IFLNK)

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

    Nothing is written, and the two folders are left out. Code that is too large is a ConfigError; a
    file that cannot be read is a StorageError.
    """
    if launch.snapshot == "off":
        return None
    repos, outside = repositories(code_folders())
    others = _results(repos, Path(output_dir), Path(data_path))
    listed: dict[str, tuple[Path, Path]] = {}  # by the name in the copy: the file and its root
    left_out, copied = list[str](), list[str]()
    for repo in repos:
        try:
            names = repo.files()
        except ConfigError as error:
            outside += repo.used
            log.warning("%s", error)
            continue
        for name, is_tracked in names.items():
            full = repo.root / name
            if any(full.is_relative_to(folder) for folder in others):
                continue
            if name.endswith("/"):
                inside = ": a repository inside another: `git submodule add` or `pip install -e` it"
                left_out += [f"{full}{inside}"] * all(full != other.root for other in repos)
            elif why := _why_not(full, is_tracked):
                left_out.append(f"{full}{why}")
            else:
                listed[f"{repo.name}/{name}"] = full, repo.root
        relative = (os.path.relpath(folder, repo.root) for folder in repo.used)
        copied += [os.path.normpath(os.path.join(repo.name, folder)) for folder in relative]
    root = PACKAGE.parent
    if not any(full == PACKAGE / "__init__.py" for full, _ in listed.values()):
        kinds = (".py", ".pyi", ".sh", ".yaml")  # `base.offered` reads its stub
        installed = (file for file in PACKAGE.rglob("*") if file.suffix in kinds)
        listed |= {f"installed/{file.relative_to(root)}": (file, root) for file in installed}
        copied.append("installed")
    files = _read(listed)
    # Python still imports from the working directory, and from the folder of a program that calls
    # hpctrain, if they could not be copied.
    places = {Path.cwd(), *map(Path, map(os.path.realpath, sys.path[:1]))}
    here = [folder for folder in outside if folder in places]
    digest = _digest(files, [*copied, *map(str, here)])
    path = Path(output_dir) / "code" / digest
    # The user is not told about folders without modules.
    unfrozen = (f for f in outside if any(f.glob("*.py")) or any(f.glob("*/__init__.py")))
    imported = (*(path / folder for folder in copied), *here)
    return Snapshot(digest, path, imported, tuple(unfrozen), files, tuple(left_out))


def _results(repos: list[Repo], results: Path, data: Path) -> list[Path]:
    """Return the folders that are not copied, as they have results or data."""
    used = [folder for repo in repos for folder in repo.used]
    # If the code itself is inside such a folder, only the results in it are left out.
    others = [p for p in (results, data) if not any(each.is_relative_to(p) for each in used)]
    if results not in others:
        others += [results / "code", results / "sweeps", results / "functions"]
        others += [*results.glob("mlflow*"), *(file.parent for file in results.glob("*/run.json"))]
    return others


def _why_not(file: Path, is_tracked: bool) -> str:
    """Return why a file is not copied, for the user; "" if it is."""
    if is_private(file.name):
        return ": it may hold secrets; jobs inherit exported variables"
    if not is_tracked and (size := _size(file)) > _LARGE:
        return f" ({size / 1e6:,.0f} MB): `git add` it if the code needs it"
    return ""


def _size(file: Path) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):  # tracked, but deleted
        return file.lstat().st_size
    return 0


def _read(listed: Mapping[str, tuple[Path, Path]]) -> dict[str, _File]:
    """Read the files, each with its root, by their names; too many bytes are a ConfigError."""
    sizes = {full: _size(full) for full, _ in listed.values()}
    if (total := sum(sizes.values())) > _LARGEST:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{path} {size / 1e6:.0f} MB" for path, size in largest)
        raise ConfigError(
            f"launch.snapshot: a copy of the code has at most {_LARGEST / 1e6:g} MB, and this one "
            f"{total / 1e6:,.0f} MB in {len(sizes):,} files (largest: {shown}); list files that "
            "are no code in .gitignore, or set launch.snapshot=off"
        )
    files = {}
    for name, (full, root) in listed.items():
        # Not what is tracked in a folder that is a link now, nor a submodule without its files.
        if os.path.realpath(full.parent) == str(full.parent) and (
            full.is_symlink() or full.is_file()
        ):
            try:
                files[name] = _File.of(full, root)
            except OSError as error:
                raise StorageError(f"launch.snapshot: {full}: {error.strerror}") from error
    return files


def _digest(files: Mapping[str, _File], imported: list[str]) -> str:
    hashed = xxhash.xxh3_128("\0".join(imported).encode("utf-8", "surrogateescape"))
    for path, file in sorted(files.items()):
        for part in (os.fsencode(path), str(file.mode).encode(), file.content):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()[:16]
