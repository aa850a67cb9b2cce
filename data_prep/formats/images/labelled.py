"""Files with labels, found in folders or named by a list, whatever the files contain."""

import csv
import os
import re
import stat
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from data_prep.formats.files import Inside, scan
from data_prep.formats.samples import Unusable
from data_prep.source import BadRecords, SourceFile, readable
from data_prep.writing.commit import PARTIAL
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.index import FILE

FOLDER = "folder"  # the name of the column that holds the folders below a root
SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # an int64 has them all


@dataclass(slots=True)
class Labelled(Sequence[SourceFile]):
    """Files with their labels and splits; a million files take little more memory than their paths.

    Each piece has a part of them.
    """

    root: str  # the folder that the names are relative to
    names: list[str] = field(default_factory=list)  # paths below the root, or absolute paths
    sizes: "array[int]" = field(default_factory=lambda: array("q"))  # sizes in bytes
    # Times of the last change, in ns.
    times: "array[int]" = field(default_factory=lambda: array("q"))
    # The label of each file as a number; empty without labels.
    labels: "array[int]" = field(default_factory=lambda: array("q"))
    # The value of each file for `--split column:…` or `--group`; empty without them.
    column: list[str] = field(default_factory=list)
    # The line of each file in the list; empty without a list.
    records: list[str] = field(default_factory=list)
    # The label of each file as it was found; a piece needs only the number.
    texts: list[Any] = field(default_factory=list)
    # The files that cannot be used: (file, record, reason).
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def add(
        self, name: str, found: os.stat_result, label: Any, column: Any, record: str = ""
    ) -> None:
        """Append a file; without labels, a column or a list, these are None or ""."""
        self.names.append(name)
        self.sizes.append(found.st_size)
        self.times.append(found.st_mtime_ns)
        self.texts += [] if label is None else [label]
        self.column += [] if column is None else [sys.intern(str(column))]
        self.records += [record] if record else []

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: Any) -> Any:
        return SourceFile(os.path.join(self.root, self.names[i]), self.sizes[i], self.times[i])

    def part(self, start: int, stop: int) -> "Labelled":
        """Return the files from `start` to `stop`; the first part gets all problems."""
        some = slice(start, stop)
        return Labelled(
            *(self.root, self.names[some], self.sizes[some], self.times[some]),
            *(self.labels[some], self.column[some], self.records[some]),
            problems=[] if start else self.problems,
        )

    def digest(self) -> str:
        """Return a digest of the names, labels and splits."""
        digest = xxhash.xxh3_128()
        for part in (self.names, self.column):
            digest.update("\0".join([*part, ""]).encode("utf-8", "surrogateescape"))
        digest.update(self.labels.tobytes())
        return digest.hexdigest()


def by_folder(
    root: Path,
    suffixes: frozenset[str],
    ignored: list[str],
    *,
    labels: bool,
    split: bool,
    outside: bool = False,
) -> Labelled:
    """Find files in folders; the names of the folders are the labels and splits of the files."""
    found = Labelled(str(root))

    def taken(name: str) -> bool:
        return os.path.splitext(name)[1].lower() in suffixes

    for name, status in scan(root, taken, ignored, outside):
        above = name.split(os.sep)[:-1]
        if len(above) < labels + split:
            what = " and ".join(["its split"] * split + ["its class"] * labels)
            form = "/".join(["SPLIT"] * split + ["CLASS"] * labels)
            hint = f", {form}/IMAGE" if split else "; --no-labels is for images without"
            raise DataError(f"{root / name} is not in a folder for {what}{hint}")
        label = sys.intern(above[split]) if labels else None
        found.add(name, status, label, above[0] if split else None)
    if labels and not split:
        names = set(found.texts)
        if names and names <= SPLITS:
            raise ConfigError(
                f"{root} has the folders {', '.join(sorted(names))}: splits, it seems. --split "
                f"column:{FOLDER} takes them so, with the classes below; if they are the classes, "
                "give them other names, or a list of the images"
            )
        with os.scandir(root) as entries:
            folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        for name in folders:
            ours = any((root / name / file).exists() for file in (FILE, PARTIAL))
            if name not in names and not ours:  # the output folder may be below the root
                raise DataError(
                    f"{root / name} has no files of this kind, so it is no class: remove it"
                )
    return found


def by_list(
    path: Path,
    columns: Sequence[str],
    problems: BadRecords,
    *,
    labels: bool,
    split: bool,
    outside: bool,
) -> Labelled:
    """Take the files that a CSV file names."""
    root = path.parent
    found = Labelled(str(root))
    seen: dict[str, str] = {}
    inside = Inside(str(root), outside)
    for record, (name, *values) in _rows(path, columns):
        try:
            if not name:
                raise Unusable(f"it has no {columns[0]!r}")
            plain = os.path.normpath(name)
            if not outside and (os.path.isabs(plain) or plain.split(os.sep)[0] == os.pardir):
                raise Unusable(f"{name!r} leads out of {root}; --allow-outside allows it")
            if problem := inside.problem(os.path.join(root, plain)):
                raise Unusable(f"{name!r} {problem}")
            if plain in seen:
                raise Unusable(f"{name!r} is in {seen[plain]} already")
            if labels and not values[0]:
                raise Unusable(f"it has no {columns[1]!r}")
            if split and not values[-1]:
                raise Unusable(f"it has no {columns[-1]!r}, the name of its split or group")
            status = _status(os.path.join(root, plain), name)
        except Unusable as error:
            problems.bad(str(path), record, str(error))
            continue
        seen[plain] = record
        label, column = values[0] if labels else None, values[-1] if split else None
        found.add(plain, status, label, column, f"{record} of {path.name}")
    return found


def numbers(found: Labelled) -> tuple[list[str] | None, "array[int]"]:
    """Return the names of the classes (None if labels are numbers), and each file's number."""
    texts = found.texts
    # The name of a folder is always text, also if it looks like a number.
    if found.records and all(map(_WHOLE.fullmatch, set(texts))):
        return None, array("q", map(int, texts))
    names = sorted(set(texts), key=os.fsencode)
    places = {name: i for i, name in enumerate(names)}
    return names, array("q", (places[text] for text in texts))


def _status(path: str, name: str) -> os.stat_result:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = error.strerror if isinstance(error, OSError) else "no path"
        raise Unusable(f"{name!r} cannot be read: {why}") from None
    if not stat.S_ISREG(found.st_mode):
        raise Unusable(f"{name!r} is no file")
    return found


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a list: a name for messages such as "line 3", and the values."""
    if path.suffix != ".csv":
        raise DataError(f"{path}: a list of images is .csv")
    SourceFile.of(path)
    try:
        with readable(path), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _check_columns(path, columns, header)
            which = [header.index(name) for name in columns]
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells, the header has "
                        f"{len(header)}"
                    )
                yield f"line {reader.line_num}", [cells[i] for i in which]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _check_columns(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
    for name in columns:
        if found.count(name) != 1:
            what = "two columns" if name in found else "no column"
            raise ConfigError(f"{path} has {what} {name!r}; it has {few(found, 30) or 'none'}")
