"""Files with labels, found in folders or named by a list, whatever the files contain."""

import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from data_prep.formats.images.listing import Files, Ignored, look, rows, scan
from data_prep.formats.outside import Inside
from data_prep.formats.samples import Unusable
from data_prep.writing.piece import Problems
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.commit import PARTIAL
from hpctrain.shards.index import FILE

FOLDER = "folder"  # the name of the column that holds the folders below a root
SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))
WHOLE = range(-(2**63), 2**63)


@dataclass(slots=True)
class Labelled:
    """Files with their labels, splits and problems; each piece has a part of them.

    Attributes:
        files: The files, in their order.
        texts: The label of each file as it was found; a piece needs only the number.
        labels: The label of each file as a number; empty without labels.
        column: The value of each file for `--split column:…` or `--group`; empty without them.
        records: The line of each file in the list; empty without a list.
        problems: The files that cannot be used: (file, record, reason).
    """

    files: Files
    texts: list[Any] = field(default_factory=list)
    labels: "array[int]" = field(default_factory=lambda: array("q"))
    column: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def part(self, start: int, stop: int) -> "Labelled":
        """Return the files from `start` to `stop`; the first part gets all problems."""
        some = slice(start, stop)
        return Labelled(
            self.files[some],
            [],
            self.labels[some],
            self.column[some],
            self.records[some],
            [] if start else self.problems,
        )

    def digest(self) -> str:
        """Return a digest of the names, labels and splits."""
        digest = xxhash.xxh3_128()
        for part in (self.files.names, self.column):
            digest.update("\0".join([*part, ""]).encode("utf-8", "surrogateescape"))
        digest.update(self.labels.tobytes())
        return digest.hexdigest()


def by_folder(
    root: Path,
    suffixes: frozenset[str],
    problems: Problems,
    ignored: Ignored,
    fixed: Sequence[str] | None,
    *,
    labels: bool,
    split: bool,
    outside: bool = False,
) -> Labelled:
    """Find files in folders; the names of the folders are the labels and splits of the files.

    Args:
        root: The folder with the classes, or with the splits, which then have the classes.
        suffixes: Endings of the files to find.
        problems: Takes the files that cannot be used.
        ignored: Takes all other files.
        fixed: The classes, if the user lists them.
        labels: Whether the folders are classes.
        split: Whether the folders directly below `root` are splits.
        outside: Whether links may lead out of `root`.

    Raises:
        ConfigError: The folders seem to be splits, but are taken for classes.
        DataError: A file is in no class, or a class has no file.
    """
    found = Labelled(Files(str(root)))
    for name, status in scan(root, suffixes, ignored, outside):
        above = name.split(os.sep)[:-1]
        if len(above) < labels + split:
            what = " and ".join(["its split"] * split + ["its class"] * labels)
            form = "/".join(["SPLIT"] * split + ["CLASS"] * labels)
            hint = f", {form}/IMAGE" if split else "; --no-labels is for images without"
            raise DataError(f"{root / name} is not in a folder for {what}{hint}")
        if labels and fixed is not None and above[split] not in fixed:
            problems.bad(str(root / name), "", f"its class {above[split]!r} is not in --classes")
            continue
        found.files.add(name, status)
        if labels:
            found.texts.append(sys.intern(above[split]))
        if split:
            found.column.append(sys.intern(above[0]))
    if labels and fixed is None and not split:
        names = set(found.texts)
        if names and names <= SPLITS:
            raise ConfigError(
                f"{root} has the folders {', '.join(sorted(names))}: splits, it seems. --split "
                f"column:{FOLDER} takes them so, with the classes below; if they are the classes, "
                "list them in a file for --classes"
            )
        with os.scandir(root) as entries:
            folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        for name in folders:
            ours = any((root / name / file).exists() for file in (FILE, PARTIAL))
            if name not in names and not ours:  # the output folder may be below the root
                raise DataError(
                    f"{root / name} has no files of this kind, so it is no class; remove it, or "
                    "list the classes in a file for --classes"
                )
    return found


def by_list(
    path: Path,
    columns: Sequence[str],
    problems: Problems,
    fixed: Sequence[str] | None,
    *,
    labels: bool,
    split: bool,
    outside: bool,
) -> Labelled:
    """Take the files that a list names; see `data_prep.formats.images.listing.rows`.

    Args:
        path: The list.
        columns: Names of the columns with the path, then the label (with `labels`), then the split
            (with `split`).
        problems: Takes the files that cannot be used.
        fixed: The classes, if the user lists them.
        labels: Whether the list has labels.
        split: Whether the list has splits.
        outside: Whether files may be outside of the list's folder.

    Raises:
        ConfigError: A column is missing.
        DataError: The list is damaged.
    """
    root = path.parent
    found = Labelled(Files(str(root)))
    seen: dict[str, str] = {}
    known = None if fixed is None else frozenset(fixed)
    inside = Inside(str(root), outside)
    for record, (name, *values) in rows(path, columns):
        try:
            if not isinstance(name, str) or not name:
                raise Unusable(f"its {columns[0]!r} is {name!r}, no path")
            plain = os.path.normpath(name)
            if not outside and (os.path.isabs(plain) or plain.split(os.sep)[0] == os.pardir):
                raise Unusable(f"{name!r} leads out of {root}; --allow-outside allows it")
            if problem := inside.problem(os.path.join(root, plain)):
                raise Unusable(f"{name!r} {problem}")
            if plain in seen:
                raise Unusable(f"{name!r} is in {seen[plain]} already")
            label = _label(values[0], columns[1], known) if labels else None
            if split and (not isinstance(values[-1], str | int) or values[-1] == ""):
                raise Unusable(
                    f"its {columns[-1]!r} is {values[-1]!r}, no name of a split or group"
                )
            try:
                status = look(os.path.join(root, plain))
            except DataError as error:
                raise Unusable(f"{name!r} {error}") from None
        except Unusable as error:
            problems.bad(str(path), record, str(error))
            continue
        seen[plain] = record
        found.files.add(plain, status)
        found.records.append(f"{record} of {path.name}")
        if labels:
            found.texts.append(label)
        if split:
            found.column.append(sys.intern(str(values[-1])))
    return found


def _label(value: Any, column: str, known: frozenset[str] | None) -> str | int:
    """Check a label from a list, and return it."""
    if value is None or value == "":
        raise Unusable(f"it has no {column!r}")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise Unusable(f"its {column!r} is {value!r}, neither text nor a whole number")
    if isinstance(value, int) and value not in WHOLE:
        raise Unusable(f"its {column!r} is {value}, too large for int64")
    if known is not None and str(value) not in known:
        raise Unusable(f"its {column!r} is {value!r}, which is not in --classes")
    return value


def numbers(
    path: Path, found: Labelled, fixed: Sequence[str] | None
) -> tuple[list[str] | None, "array[int]"]:
    """Return the names of the classes (None if labels are numbers), and each file's number.

    Raises:
        DataError: Some labels are text and some are numbers.
    """
    texts = found.texts
    if fixed is None:
        kinds = {type(text) for text in texts}
        if len(kinds) > 1:
            raise DataError(f"{path}: some labels are text, some are numbers")
        # The name of a folder is always text, also if it looks like a number.
        if found.records and all(_is_whole(text) for text in set(texts)):
            return None, array("q", map(int, texts))
        fixed = sorted(set(texts), key=os.fsencode)
    places = {name: i for i, name in enumerate(fixed)}
    return list(fixed), array("q", (places[str(text)] for text in texts))


def _is_whole(text: str | int) -> bool:
    if isinstance(text, int):
        return True
    digits = text.removeprefix("-")
    return (
        len(text) < 20
        and digits.isascii()
        and digits.isdigit()
        and str(int(text)) == text
        and int(text) in WHOLE
    )


def classes(path: Path) -> list[str]:
    """Read a file with the name of one class in each line.

    Raises:
        ConfigError: The file has no name, or one twice, or cannot be read.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"--classes {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--classes {path} is not UTF-8") from None
    names = [line.strip() for line in lines if line.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or not names:
        raise ConfigError(
            f"--classes {path}: "
            + ("it is empty" if twice is None else f"{twice!r} is there twice")
        )
    return names
