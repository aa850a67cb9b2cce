"""Many small files, and lists that name them.

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

from data_prep.formats.files import Part
from data_prep.formats.opening import open_parquet, parquet_rows, way
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
        for batch, number in parquet_rows(file, Part(str(path)), columns):
            values = (batch.column(name).to_pylist() for name in columns)
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
