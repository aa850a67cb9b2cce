"""Image files with their classes: a folder for each class, or a list of paths and labels.

SRC/cat/1.jpg              the folders below SRC, in the order of their names' bytes, are the
SRC/dog/a/2.jpg            labels 0, 1, …; with --no-labels they mean nothing
SRC/train/cat/1.jpg        --split column:folder: the splits come first
SRC.csv, .jsonl, .parquet  columns `path` (relative to the list) and `label`; any other can be
                           the split: --split column:NAME

A list's labels that are all whole numbers are taken as they are; others are the classes in the
order of their bytes, or of --classes. The fields are image and label (int64). In a folder, hidden
files and those without a suffix of an image are ignored, and counted. The path decides the split of
`train=0.9,val=0.1`, so that it does not depend on the size.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.formats import pixels
from data_prep.formats.image_files import SUFFIXES
from data_prep.formats.labelled import FOLDER, Labelled, by_folder, by_list, numbers
from data_prep.formats.labelled import classes as read_classes
from data_prep.formats.listing import Ignored
from data_prep.formats.pixels import Pixels
from data_prep.formats.samples import Samples, Unusable
from data_prep.options import Options, add_arguments
from data_prep.piece import Problems
from data_prep.source import Block, Piece, Reading, Source, SourceFile
from data_prep.split import ByColumn, ByFile
from hpctrain.data.field import Field, check_name
from hpctrain.errors import ConfigError, DataError

MAX_FILE = 2**31  # bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
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
    """Convert the source that the command line names."""
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


@dataclass(frozen=True)
class ImageSource(Source):
    """See `images`."""

    pixels: Pixels = field(default_factory=Pixels)
    root: str = ""
    singly: bool = False  # the split is by file, and so a block has one

    def read(self, what: Labelled, reading: Reading) -> Iterator[Block]:
        """See `Source`."""
        for problem in what.problems:
            reading.bad(*problem)
        samples = Samples(self.fields, self.root, columned=bool(what.column))
        shape = None if self.pixels.encoded else self.fields["image"]
        for i, file in enumerate(what.files):
            record = what.records[i] if what.records else ""
            room = None if shape is None else samples.room("image")
            try:
                image = self.pixels.sample(_content(file), shape, room)
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
    pixels: Pixels | None = None,
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
    pixels = pixels or Pixels()
    if classes and not labels:
        raise ConfigError("--classes and --no-labels: one of them")
    fixed = read_classes(classes) if classes else None
    split = options.split.column if isinstance(options.split, ByColumn) else ""
    problems, ignored = Problems(options.on_error), Ignored()
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        if split and split != FOLDER:
            raise ConfigError(f"--split column:{split}: a folder of images has column:{FOLDER}")
        found = by_folder(
            path, SUFFIXES, problems, ignored, fixed, labels=labels, split=bool(split)
        )
    else:
        wanted = [columns[0], *([columns[1]] if labels else []), *([split] if split else [])]
        found = by_list(
            path, wanted, problems, fixed, labels=labels, split=bool(split), outside=outside
        )
    if not found.files:
        why = f": {problems.found[0]}" if problems.found else ""
        raise DataError(f"{path} has no images{why}")
    names: list[str] | None = None
    if labels:
        names, found.labels = numbers(path, found, fixed)
    for name in set(found.column):
        check_name(name, "split")
    spec = pixels.field or _first(pixels, found, Problems(options.on_error), path)
    fields = {"image": spec} | ({"label": Field("int64")} if labels else {})
    found.problems = [(p.file, p.record, p.reason) for p in problems.found]
    return ImageSource(
        name="images",
        fields=fields,
        pieces=_pieces(found, spec, options.shard_bytes),
        identity={"pixels": pixels.identity(), "content": found.digest(), "classes": names},
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


def _first(pixels: Pixels, found: Labelled, problems: Problems, path: Path) -> Field:
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


def _pieces(found: Labelled, spec: Field, shard_bytes: int) -> list[Piece]:
    pieces = []
    row_bytes = 0 if spec.variable else spec.nbytes
    start, nbytes = 0, 0
    for i, size in enumerate(found.files.sizes):
        size = row_bytes or size
        if i > start and nbytes + size > shard_bytes:
            pieces.append(_piece(found.part(start, i), nbytes))
            start, nbytes = i, 0
        nbytes += size
    return [*pieces, _piece(found.part(start, len(found.files)), nbytes)]


def _piece(part: Labelled, nbytes: int) -> Piece:
    return Piece(part, part.files, samples=len(part.files), bytes=nbytes)


def _content(file: SourceFile) -> bytes:
    """A file.

    Raises:
        Unusable: It cannot be read.
    """
    if file.size > MAX_FILE:
        raise Unusable(f"it has {file.size} bytes; an image file has at most {MAX_FILE}")
    try:
        with open(file.path, "rb", buffering=0) as content:
            return content.readall()
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from None
