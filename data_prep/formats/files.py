"""Find the files of a source, and cut them into pieces.

A part is a range of one file, in the unit of its format: bytes of a text file, row groups of
Parquet. A piece is one part or several consecutive ones.
"""

import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.source import Piece, SourceFile, readable
from hpctrain.base.errors import ConfigError, DataError

OUTSIDE = """
--allow-outside
    follow symbolic links in SRC that lead out of it, such as those of a Hugging Face cache; without
    this option they are refused
"""


class Inside:
    """Checks that paths in a folder also lie in it when their links are followed."""

    def __init__(self, folder: str, outside: bool) -> None:
        self._outside = outside
        self._root = os.path.realpath(folder)
        self._folder = lru_cache(maxsize=1024)(os.path.realpath)  # many files are in each folder

    def problem(self, path: str) -> str:
        """Return why a path must not be read, "" if it may be; the message follows the path."""
        if self._outside:
            return ""
        above, name = os.path.split(path)
        try:
            real = os.path.join(self._folder(above), name)
            if os.path.islink(real):
                real = os.path.realpath(real)
        except ValueError:  # a zero byte: whoever opens the path reports it
            return ""
        if os.path.commonpath([self._root, real]) == self._root:
            return ""
        return (
            f"is a link that leads out of the folder, to {real}; --allow-outside follows such links"
        )

    def check(self, path: str) -> None:
        """Check one path."""
        if problem := self.problem(path):
            raise DataError(f"{path} {problem}")


class FileRange(NamedTuple):
    """The range `start` to `stop` of a file; `stop` 0 is the whole file."""

    path: str
    start: int = 0
    stop: int = 0


class _FoundFiles(NamedTuple):
    """The files in the order of the sources, and the number of other files in the folders."""

    files: tuple[SourceFile, ...]
    ignored: int


def find(sources: Sequence[Path], patterns: Sequence[str], outside: bool = False) -> _FoundFiles:
    """Return files with any name, and those in folders whose names match one of the patterns."""
    files, ignored = list[SourceFile](), list[str]()

    def taken(name: str) -> bool:
        return any(fnmatchcase(os.path.basename(name), pattern) for pattern in patterns)

    for source in sources:
        if not source.is_dir():
            files.append(SourceFile.of(str(source)))
            continue
        before = len(files)
        for name, status in scan(source, taken, ignored, outside, follow=False):
            path = os.path.join(source, name)
            files.append(SourceFile(path, status.st_size, status.st_mtime_ns))
        if len(files) == before:
            raise DataError(
                f"{source} has no file named {' or '.join(patterns)} (there are {len(ignored)} "
                "others)"
            )
    seen: set[str] = set()
    for file in files:
        path = os.path.abspath(file.path)
        if path in seen:
            raise ConfigError(f"{file.path} is there twice; each file once")
        seen.add(path)
    return _FoundFiles(tuple(files), len(ignored))


def in_folders(paths: Iterable[Path], taken: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """Yield the files, and those right in the folders that are `taken`, sorted by name."""
    for path in paths:
        inside = [path]
        with readable(path):
            if path.is_dir():
                inside = sorted(filter(taken, path.iterdir()))
        if not inside:
            raise DataError(f"{path} has no {what} files")
        yield from inside


def scan(
    root: Path,
    taken: Callable[[str], bool],
    ignored: list[str],
    outside: bool = False,
    *,
    follow: bool = True,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of these names at any depth: path below `root`, and its stat.

    The order in each folder is that of the names' bytes. Links to files are followed, and with
    `follow` those to folders; unless `outside` is true, they must not lead out of `root`. Hidden
    files and folders, files of other names and non-regular files are counted in `ignored`.
    """
    within = Inside(str(root), outside)

    def walk(below: str, above: tuple[tuple[int, int], ...]) -> Iterator[Any]:
        folder = os.path.join(root, below)
        here = os.stat(folder)
        inside = (*above, (here.st_dev, here.st_ino))
        if inside[-1] in above:
            raise DataError(f"{folder} is a link that leads back to a folder above it")
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            name, link = os.path.join(below, entry.name), entry.is_symlink()
            if entry.name.startswith("."):
                ignored.append(name)
            elif entry.is_dir():
                if link and follow:
                    within.check(entry.path)
                if follow or not link:
                    yield from walk(name, inside)
            elif taken(name) and stat.S_ISREG((status := entry.stat()).st_mode):
                if link:
                    within.check(entry.path)
                yield name, status
            else:
                ignored.append(name)

    try:
        yield from walk("", ())
    except OSError as error:  # of a folder, or of a link that leads nowhere
        where = os.fsdecode(error.filename) if error.filename else root
        raise DataError(f"{where} cannot be read: {error.strerror}") from None


def pieces(parts: Iterable[tuple[FileRange, SourceFile, int]], nbytes: int) -> list[Piece]:
    """Join parts into pieces of about `nbytes`; each comes with its file and its bytes of data."""
    joined: list[Piece] = []
    group: list[FileRange] = []
    files: dict[str, SourceFile] = {}
    size = 0
    for part, file, more in parts:
        if group and size + more > nbytes:
            joined.append(Piece(tuple(group), tuple(files.values()), bytes=size))
            group, files, size = [], {}, 0
        group.append(part)
        files[file.path] = file
        size += more
    if group:
        joined.append(Piece(tuple(group), tuple(files.values()), bytes=size))
    return joined


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of at most `step` that cover 0 to `total`."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def lines_of(part: FileRange) -> tuple[int, int]:
    """Return the bytes, from and to, of the lines that begin in a part.

    A file may be cut at any bytes: each of its lines is in exactly one part.
    """
    if not part.stop:
        return 0, sys.maxsize
    with open(part.path, "rb", buffering=0) as file:
        return _line_after(file, part.start), _line_after(file, part.stop)


def _line_after(file: io.FileIO, at: int) -> int:
    """Return where the first line at or after byte `at` begins, or the end if there is none."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while block := file.read(2**16):
        found = block.find(b"\n")
        if found >= 0:
            return file.tell() - len(block) + found + 1
    return file.tell()


def line_at(path: str, offset: int) -> int:
    """Return the number (from 1) of the line at a byte offset. It is counted; for messages only."""
    count = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(2**20, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return count
