"""Image files with their classes: a folder for each class, or a list of paths and labels.

SRC/cat/1.jpg              the folders below SRC, in the order of their names' bytes, are the
SRC/dog/a/2.jpg            labels 0, 1, …; with --no-labels there are no labels
SRC/train/cat/1.jpg        with --split column:folder, the first folders are the splits
SRC.csv                    columns `path` (relative to the list) and `label`; another column can
                           decide the split: --split column:NAME

The fields are image and label (int64). If all labels of a list are whole numbers, they are the
values of the field. Otherwise they are class names, numbered in the order of their bytes. In a
folder, hidden files and files without the suffix of an image are ignored and
counted. For a split such as `train=0.9,val=0.1`, the path of an image decides, so options such as
--size do not change it.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from data_prep.formats.images import pixels
from data_prep.formats.images.image_files import SUFFIXES
from data_prep.formats.images.labelled import FOLDER, Labelled, by_folder, by_list, numbers
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable
from data_prep.options import Options, writing
from data_prep.source import BadRecords, InputSource, Piece, SampleBlock, SourceFile
from data_prep.sources.stream import Encoded, Stream
from data_prep.writing.split import ByColumn, ByFile
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import Field, name_problem

ARGUMENTS = f"""
source=SRC : path
    a folder, or a list of paths
[labels]
--no-labels
    write no labels
--path-column NAME = path
    the list's column of paths
--label-column NAME = label
    the list's column of labels
--allow-outside
    allow paths in a list, and symbolic links, that lead out of its folder or of SRC
{pixels.OPTIONS}
{writing()}
"""
EPILOG = pixels.__doc__


@dataclass(frozen=True)
class _Images(Stream):
    keyed = True

    def read(self, what: Labelled, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        for problem in what.problems:
            reading.bad(*problem)
        yield from super().read(what, reading)

    def encoded(self, what: Labelled, reading: BadRecords) -> Iterator[Encoded]:
        """See `Stream`."""
        for i, file in enumerate(what):
            record = what.records[i] if what.records else ""
            decode = partial(self._values, what, i)
            yield Encoded(file.path, record, decode, os.fsencode(what.names[i]))

    def _values(self, what: Labelled, i: int) -> tuple[dict[str, Any], str]:
        content = _content(what[i])
        values: dict[str, Any] = {"image": self.pixels.sample(content, self.fields.get("image"))}
        if what.labels:
            values["label"] = what.labels[i]
        return values, what.column[i] if what.column else ""


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return image files with their labels."""
    path, labels, pixels = args.source, not args.no_labels, Pixels.of(args)
    split, by_column = options.column, isinstance(options.split, ByColumn)
    problems, ignored = BadRecords(options.on_error), list[str]()
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir() and split not in ("", FOLDER):
        given = f"--split column:{split}" if by_column else f"--group {split}"
        raise ConfigError(f"{given}: a folder of images has column:{FOLDER}")
    how: Any = {"labels": labels, "split": bool(split), "outside": args.allow_outside}
    if path.is_dir():
        found = by_folder(path, SUFFIXES, ignored, **how)
    else:
        columns = [args.path_column, *[args.label_column] * labels, *[split] * bool(split)]
        found = by_list(path, columns, problems, **how)
    if not found:
        raise DataError(f"{path} has no images{problems.why()}")
    names: list[str] | None = None
    if labels:
        names, found.labels = numbers(found)
    for name in set(found.column) if by_column else ():
        if problem := name_problem(name, "split"):
            raise DataError(problem)
    if ignored and not options.quiet:
        said = f"{len(ignored)} files are no images and are ignored, such as {ignored[0]!r}"
        print(said, file=sys.stderr)
    found.problems = [(p.file, p.record, p.reason) for p in problems.found]
    made = _Images(
        name="images",
        fields={},
        pieces=[Piece(found)],
        identity={"pixels": asdict(pixels), "content": found.digest(), "classes": names},
        about={
            "from": str(path.absolute()),
            "ignored": len(ignored),
            "first_ignored": next(iter(ignored), ""),
        },
        categories={} if names is None else {"label": names},
        pixels=pixels,
        images=frozenset(["image"]),
        by_file=isinstance(options.split, ByFile),
    ).with_fields(options, (), f"{path}: none of its images can be used")
    return replace(
        made,
        pieces=_pieces(found, made.fields["image"], options.shard_bytes),
        columns=(split,) if split else (FOLDER,) if path.is_dir() else (),
        by_field=False,
        begin=(None, ()),  # the times of the files are compared
    )


def _pieces(found: Labelled, spec: Field, shard_bytes: int) -> list[Piece]:
    row_bytes = 0 if spec.variable else spec.nbytes
    ends, sizes, nbytes = [0], list[int](), 0
    for i, size in enumerate(row_bytes or size for size in found.sizes):
        if i > ends[-1] and nbytes + size > shard_bytes:
            ends.append(i)
            sizes.append(nbytes)
            nbytes = 0
        nbytes += size
    parts = [found.part(*pair) for pair in pairwise([*ends, len(found)])]
    return [Piece(part, part, size) for part, size in zip(parts, [*sizes, nbytes], strict=True)]


def _content(file: SourceFile) -> bytes:
    """Return the content of a file."""
    try:
        with open(file.path, "rb", buffering=0) as content:
            return content.readall()
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from None
