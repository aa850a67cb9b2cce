"""Image files with their classes: a folder for each class, or a list of paths and labels.

SRC/cat/1.jpg              the folders below SRC, in the order of their names' bytes, are the
SRC/dog/a/2.jpg            labels 0, 1, …; with --no-labels they mean nothing
SRC/train/cat/1.jpg        --split column:folder: the splits come first
SRC.csv, .jsonl, .parquet  columns `path` (relative to the list) and `label`; any other can be
                           the split: --split column:NAME

Labels that are all whole numbers are taken as they are; others are the classes in the order of
their bytes, or of --classes. The fields are image and label (int64). In a folder, hidden files
and those without a suffix of an image are ignored, and counted. The path decides the split of
`train=0.9,val=0.1`, so that it does not depend on the size.
"""

import argparse
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep import pixels
from data_prep.listing import Files, Ignored, look, rows, scan
from data_prep.options import Options, add_arguments
from data_prep.piece import Problems
from data_prep.pixels import SUFFIXES, Pixels
from data_prep.samples import Samples, Unusable
from data_prep.source import Block, Piece, Reading, Source, SourceFile
from data_prep.split import ByColumn, ByFile
from hpctrain.data.index import Field, check_name
from hpctrain.errors import ConfigError, DataError

MAX_FILE = 2**31  # bytes
FOLDER = "folder"  # the column of the folders below SRC
SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))
WHOLE = range(-(2**63), 2**63)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = pixels.__doc__
    parser.add_argument("source", type=Path, metavar="SRC", help="a folder, or a list of paths")
    group = parser.add_argument_group("labels")
    group.add_argument("--no-labels", action="store_true", help="images only")
    group.add_argument("--classes", type=Path, metavar="FILE", help="one a line, in this order")
    group.add_argument("--path-column", default="path", metavar="NAME", help="of a list")
    group.add_argument("--label-column", default="label", metavar="NAME", help="of a list")
    group.add_argument(
        "--allow-outside",
        action="store_true",
        help="a list's paths may be absolute or lead out of its folder",
    )
    pixels.add_arguments(parser)
    add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Do it; see `convert`."""
    from data_prep.convert import convert

    options = Options.of(args)
    source = images(
        args.source,
        options,
        Pixels.of(args),
        labels=not args.no_labels,
        classes=args.classes,
        columns=(args.path_column, args.label_column),
        outside=args.allow_outside,
    )
    ignored = source.about["ignored"]
    if ignored and not options.quiet:
        first = source.about["first_ignored"]
        print(f"{ignored} files are no images and are ignored, such as {first!r}", file=sys.stderr)
    convert(source, args.out, options)


@dataclass(slots=True)
class Images:
    """Images that were found, with what is known of each; a piece has a part of them.

    Attributes:
        files: The images.
        texts: The label of each as it was found; a piece needs the number only.
        labels: The label of each as a number, or empty.
        column: What `--split column:…` goes by, of each, or empty.
        records: The line of each in a list, or empty.
        problems: Of those that cannot be used, (file, record, reason).
    """

    files: Files
    texts: list[Any] = field(default_factory=list)
    labels: "array[int]" = field(default_factory=lambda: array("q"))
    column: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def part(self, start: int, stop: int) -> "Images":
        """Some of them; the problems go with the first."""
        some = slice(start, stop)
        return Images(
            self.files[some],
            [],
            self.labels[some],
            self.column[some],
            self.records[some],
            [] if start else self.problems,
        )

    def digest(self) -> str:
        """Of the names and what belongs to them."""
        digest = xxhash.xxh3_128()
        for part in (self.files.names, self.column):
            digest.update("\0".join([*part, ""]).encode("utf-8", "surrogateescape"))
        digest.update(self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ImageSource(Source):
    """See `images`."""

    pixels: Pixels = field(default_factory=Pixels)
    root: str = ""
    singly: bool = False  # the split is by file, and so a block has one

    def read(self, what: Images, reading: Reading) -> Iterator[Block]:
        """See `Source`."""
        for problem in what.problems:
            reading.bad(*problem)
        samples = Samples(self.fields, self.root, columned=bool(what.column))
        shape = None if self.pixels.encoded else self.fields["image"]
        for i, file in enumerate(what.files):
            record = what.records[i] if what.records else ""
            try:
                image = self.pixels.sample(_content(file), shape)
            except Unusable as error:
                reading.bad(file.path, record, str(error))
                continue
            sample = {"image": image}
            if what.labels:
                sample["label"] = np.array(what.labels[i])
            name = what.files.names[i]
            if self.singly:
                samples = Samples(self.fields, file.path, columned=bool(what.column))
            samples.add(sample, name, os.fsencode(name), what.column[i] if what.column else "")
            if samples.full or self.singly:
                yield samples.take()
        if len(samples):
            yield samples.take()


def images(
    path: Path,
    options: Options,
    pixels: Pixels = Pixels(),  # noqa: B008 (frozen)
    *,
    labels: bool = True,
    classes: Path | None = None,
    columns: tuple[str, str] = ("path", "label"),
    outside: bool = False,
) -> Source:
    """A source of image files.

    Args:
        path: A folder, or a list.
        options: How much makes a piece, and what the split goes by.
        pixels: What becomes of an image.
        labels: There is a field `label`.
        classes: A file with the names of all classes, in the order of their labels.
        columns: Of a list: that of the paths and that of the labels.
        outside: A list may name files that are not below its folder.

    Raises:
        ConfigError: A column is missing, or options that do not go together.
        DataError: No image; an image without a label; and, unless `--on-error` says
            otherwise, a label or path that is not allowed, or a first image that is damaged.
    """
    if classes and not labels:
        raise ConfigError("--classes and --no-labels: one of them")
    fixed = _classes(classes) if classes else None
    split = options.split.column if isinstance(options.split, ByColumn) else ""
    problems, ignored = Problems(options.on_error), Ignored()
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        if split and split != FOLDER:
            raise ConfigError(f"--split column:{split}: a folder of images has column:{FOLDER}")
        found = _by_folder(path, problems, ignored, fixed, labels=labels, split=bool(split))
    else:
        wanted = [columns[0], *([columns[1]] if labels else []), *([split] if split else [])]
        found = _by_list(
            path, wanted, problems, fixed, labels=labels, split=bool(split), outside=outside
        )
    if not found.files:
        why = f": {problems.found[0]}" if problems.found else ""
        raise DataError(f"{path} has no images{why}")
    names: list[str] | None = None
    if labels:
        names, found.labels = _numbers(path, found, fixed)
    for name in set(found.column):
        check_name(name, "split")
    spec = pixels.field or _first(pixels, found, Problems(options.on_error), path)
    fields = {"image": spec} | ({"label": Field("int64")} if labels else {})
    found.problems = [(p.file, p.record, p.reason) for p in problems.found]
    return ImageSource(
        name="images",
        fields=fields,
        pieces=_pieces(found, spec, options.shard_bytes),
        identity={"pixels": pixels.identity(), "content": found.digest()},
        about={
            "from": str(path.absolute()),
            "ignored": ignored.count,
            "first_ignored": ignored.first,
        },
        categories={} if names is None else {"label": names},
        columns=(split,) if split else (FOLDER,) if path.is_dir() else (),
        pixels=pixels,
        root=found.files.root,
        singly=isinstance(options.split, ByFile),
    )


def _by_folder(
    root: Path,
    problems: Problems,
    ignored: Ignored,
    fixed: Sequence[str] | None,
    *,
    labels: bool,
    split: bool,
) -> Images:
    found = Images(Files(str(root)))
    for name, status in scan(root, SUFFIXES, ignored):
        above = name.split(os.sep)[:-1]
        if len(above) < labels + split:
            what = " and ".join(["its split"] * split + ["its class"] * labels)
            hint = "" if split else "; --no-labels is for images without"
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
        classes = set(found.texts)
        if classes and classes <= SPLITS:
            raise ConfigError(
                f"{root} has the folders {', '.join(sorted(classes))}: splits, it seems. --split "
                f"column:{FOLDER} takes them so, with the classes below; if they are the classes, "
                "list them in a file for --classes"
            )
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in classes:
                raise DataError(
                    f"{entry.path} has no images, so it is no class; remove it, or list the "
                    "classes in a file for --classes"
                )
    return found


def _by_list(
    path: Path,
    columns: Sequence[str],
    problems: Problems,
    fixed: Sequence[str] | None,
    *,
    labels: bool,
    split: bool,
    outside: bool,
) -> Images:
    root = path.parent
    found = Images(Files(str(root)))
    seen: dict[str, str] = {}
    known = None if fixed is None else frozenset(fixed)
    for record, (name, *values) in rows(path, columns):
        try:
            if not isinstance(name, str) or not name:
                raise Unusable(f"its {columns[0]!r} is {name!r}, no path")
            plain = os.path.normpath(name)
            if not outside and (os.path.isabs(plain) or plain.split(os.sep)[0] == os.pardir):
                raise Unusable(f"{name!r} leads out of {root}; --allow-outside allows it")
            if plain in seen:
                raise Unusable(f"{name!r} is in {seen[plain]} already")
            label = _label(values[0], columns[1], known) if labels else None
            if split and (not isinstance(values[-1], str) or not values[-1]):
                raise Unusable(f"its {columns[-1]!r} is {values[-1]!r}, no name of a split")
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
            found.column.append(sys.intern(values[-1]))
    return found


def _label(value: Any, column: str, known: frozenset[str] | None) -> str | int:
    """What is in a list's column of labels.

    Raises:
        Unusable: It is missing, of another kind, or not in --classes.
    """
    if value is None or value == "":
        raise Unusable(f"it has no {column!r}")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise Unusable(f"its {column!r} is {value!r}, neither text nor a whole number")
    if isinstance(value, int) and value not in WHOLE:
        raise Unusable(f"its {column!r} is {value}, too large for int64")
    if known is not None and str(value) not in known:
        raise Unusable(f"its {column!r} is {value!r}, which is not in --classes")
    return value


def _numbers(
    path: Path, found: Images, fixed: Sequence[str] | None
) -> tuple[list[str] | None, "array[int]"]:
    """The names of the classes, if they have, and the label of each image.

    Raises:
        DataError: Text and numbers are mixed.
    """
    texts = found.texts
    if fixed is None:
        kinds = {type(text) for text in texts}
        if len(kinds) > 1:
            raise DataError(f"{path}: some labels are text, some are numbers")
        # A folder's name is a name, whatever it looks like.
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


def _classes(path: Path) -> list[str]:
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


def _first(pixels: Pixels, found: Images, problems: Problems, path: Path) -> Field:
    """The field that the first image makes.

    Raises:
        DataError: It cannot be used (`on_error` "stop"), or none can.
    """
    for i, file in enumerate(found.files):
        try:
            image = pixels.sample(_content(file))
            return Field(image.dtype.name, image.shape)
        except Unusable as error:
            problems.bad(file.path, found.records[i] if found.records else "", str(error))
    raise DataError(f"{path}: none of its images can be used, as {problems.found[0]}")


def _pieces(found: Images, spec: Field, shard_bytes: int) -> list[Piece]:
    pieces = []
    row_bytes = 0 if spec.variable else int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
    start, nbytes = 0, 0
    for i, size in enumerate(found.files.sizes):
        size = row_bytes or size
        if i > start and nbytes + size > shard_bytes:
            pieces.append(_piece(found.part(start, i), nbytes))
            start, nbytes = i, 0
        nbytes += size
    return [*pieces, _piece(found.part(start, len(found.files)), nbytes)]


def _piece(part: Images, nbytes: int) -> Piece:
    return Piece(part, part.files, samples=len(part.files), bytes=nbytes)


def _content(file: SourceFile) -> bytes:
    """A file.

    Raises:
        Unusable: It cannot be read.
    """
    if file.size > MAX_FILE:
        raise Unusable(f"it has {file.size} bytes; an image file has at most {MAX_FILE}")
    try:
        return Path(file.path).read_bytes()
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from None
