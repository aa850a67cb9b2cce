"""The files of a source that is named by files and folders, and how they are cut into pieces.

A part is a range of one file, in the unit of its format: bytes of lines, row groups of Parquet,
batches of Arrow. Parts next to each other make a piece.
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from data_prep.source import Piece, SourceFile
from hpctrain.errors import ConfigError, DataError

COUNTED = 2**20  # bytes read at once when lines are counted


class Part(NamedTuple):
    """`start` to `stop` of a file; the last part of a format without a range has `stop` 0."""

    path: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Found:
    """Files in the order of the sources; how many others lay in the folders."""

    files: tuple[SourceFile, ...]
    ignored: int


def find(sources: Sequence[Path], patterns: Sequence[str]) -> Found:
    """Look for files.

    Args:
        sources: Files, taken whatever they are called, and folders, searched at any depth in the
            order of the names. Hidden files and folders are left out; links to folders are not
            followed.
        patterns: Of the names that are taken from a folder, such as "*.txt".

    Raises:
        ConfigError: A file twice.
        DataError: A source is not there, a folder has no such file, or cannot be read.
    """
    files: list[SourceFile] = []
    ignored = 0
    for source in sources:
        if not source.is_dir():
            files.append(_regular(str(source)))
            continue
        before = len(files)
        for path in _walk(str(source)):
            if any(fnmatchcase(os.path.basename(path), pattern) for pattern in patterns):
                files.append(_regular(path))
            else:
                ignored += 1
        if len(files) == before:
            raise DataError(
                f"{source} has no file named {' or '.join(patterns)} (there are {ignored} others)"
            )
    seen: set[str] = set()
    for file in files:
        path = os.path.abspath(file.path)
        if path in seen:
            raise ConfigError(f"{file.path} is there twice; each file once")
        seen.add(path)
    return Found(tuple(files), ignored)


def _regular(path: str) -> SourceFile:
    file = SourceFile.of(path)
    if not os.path.isfile(path):  # reading a pipe or a device might never end
        raise DataError(f"{path} is no regular file")
    return file


def _walk(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        elif not entry.is_dir():  # links to folders are not followed: they may lead back
            yield entry.path


def pieces(parts: Iterable[tuple[Part, SourceFile, int]], nbytes: int) -> list[Piece]:
    """Join parts (each with its file, and the bytes of data that it becomes) to pieces."""
    joined: list[Piece] = []
    group: list[Part] = []
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
    """Cut 0 … total into ranges of at most `step`; none of nothing."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


class LinesOf(io.RawIOBase):
    """The lines of a file that begin in `start` … `stop`, as a file of their own.

    So that each line is in one part, wherever a file is cut; the cuts need no look at it.
    """

    def __init__(self, path: str, start: int, stop: int) -> None:
        # Lines are found in buffers of their own: this file is only read on.
        self._file = io.FileIO(path)
        self._at, self._stop = (_line_after(self._file, at) for at in (start, stop))
        self._file.seek(self._at)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fill `buffer`; return how much."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        count: int = self._file.readinto(view[: max(0, self._stop - self._at)])
        self._at += count
        return count

    @property
    def first(self) -> int:
        """Where in the file the next byte is read."""
        return self._at

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _line_after(file: io.FileIO, at: int) -> int:
    """Where the first line begins that begins at `at` or after it; the end, when none does."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while block := file.read(2**16):
        found = block.find(b"\n")
        if found >= 0:
            return file.tell() - len(block) + found + 1
    return file.tell()


def line_at(path: str, offset: int) -> int:
    """The number of the line at a byte, from 1: counted when it is needed, for messages."""
    with open(path, "rb") as file:
        count = 1
        while offset > 0 and (block := file.read(min(COUNTED, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return count
