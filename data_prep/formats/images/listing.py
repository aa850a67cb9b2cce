"""Many small files: find them in an order that never changes, and read lists that name them.

A million files take little more memory than their paths.
"""

import csv
import json
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from data_prep.formats.files import Inside
from data_prep.formats.opening import open_parquet, parquet_batches, way
from data_prep.show import console
from data_prep.source import SourceFile
from hpctrain.errors import ConfigError, DataError

_LISTS = (".csv", ".tsv", ".jsonl", ".parquet")


@dataclass(slots=True)
class Files(Sequence[SourceFile]):
    """A compact sequence of files with their sizes and times."""

    root: str  # the folder that the names are relative to
    names: list[str] = field(default_factory=list)  # paths below the root, or absolute paths
    sizes: "array[int]" = field(default_factory=lambda: array("q"))  # sizes in bytes
    # Times of the last change, in ns.
    times: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, name: str, found: os.stat_result) -> None:
        """Append a file."""
        self.names.append(name)
        self.sizes.append(found.st_size)
        self.times.append(found.st_mtime_ns)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, i: int) -> SourceFile: ...
    @overload
    def __getitem__(self, i: slice) -> "Files": ...
    def __getitem__(self, i: int | slice) -> "SourceFile | Files":
        if isinstance(i, slice):
            return Files(self.root, self.names[i], self.sizes[i], self.times[i])
        return SourceFile(os.path.join(self.root, self.names[i]), self.sizes[i], self.times[i])


@dataclass
class Ignored:
    """The files that are not taken: their number, and the path of the first."""

    count: int = 0
    first: str = ""

    def add(self, path: str) -> None:
        """Count a file."""
        self.first = self.first or path
        self.count += 1


def scan(
    root: Path, suffixes: frozenset[str], ignored: Ignored, outside: bool = False
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files with one of these suffixes at any depth: path below `root`, and its stat.

    The order in each folder is that of the names' bytes. Links are followed; unless `outside` is
    true, they must not lead out of `root`. Hidden files and folders, files with other suffixes and
    non-regular files are counted in `ignored`.
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
            name = os.path.join(below, entry.name)
            if entry.name.startswith("."):
                ignored.add(name)
            elif entry.is_dir():
                if entry.is_symlink():
                    within.check(entry.path)
                yield from walk(name, inside)
            elif os.path.splitext(name)[1].lower() not in suffixes:
                ignored.add(name)
            elif stat.S_ISREG((status := entry.stat()).st_mode):  # raises if a link is broken
                if entry.is_symlink():
                    within.check(entry.path)
                yield name, status
            else:
                ignored.add(name)

    try:
        yield from walk("", ())
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename else root
        raise DataError(f"{where} cannot be read: {error.strerror}") from None


def look(path: str) -> os.stat_result:
    """Return the stat of a file that a list names."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = error.strerror if isinstance(error, OSError) else "no path"
        raise DataError(f"cannot be read: {why}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is no file")
    return found


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the rows of a list: a name for messages such as "line 3", and the values."""
    reader = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: {way(str(path)) or 'a list is ' + ', '.join(_LISTS)}")
    try:
        yield from reader(path, columns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            header = next(reader, [])
            _check_columns(path, columns, header)
            which = [header.index(name) for name in columns]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells, the header has "
                        f"{len(header)}"
                    )
                yield f"line {reader.line_num}", [cells[i] for i in which]
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: {error}") from None


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        first = True
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} is no object {{…}}")
            if first:
                _check_columns(path, columns, list(row))
                first = False
            yield f"line {number}", [row.get(name) for name in columns]


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    with open_parquet(str(path)) as file:
        _check_columns(path, columns, file.schema_arrow.names)
        number, groups = 0, range(file.num_row_groups)
        for batch in parquet_batches(file, str(path), 2**16, groups, list(dict.fromkeys(columns))):
            values = [batch.column(name).to_pylist() for name in columns]
            for row in zip(*values, strict=True):
                number += 1
                yield f"row {number}", list(row)


def _check_columns(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
    for name in columns:
        if found.count(name) != 1:
            what = "two columns" if name in found else "no column"
            raise ConfigError(
                f"{path} has {what} {name!r}; it has {console.listed(found) or 'none'}"
            )
