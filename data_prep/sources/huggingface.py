"""A folder that `save_to_disk` of Hugging Face's library `datasets` has written.

    python -m data_prep huggingface cifar10/ OUT --mode RGB

A DatasetDict keeps its splits (--split column:split). All samples of a Dataset go to `train`,
unless --split says something else. The features become fields:

Value, List, Sequence   as in `table`: numbers, text as variable-length uint8, lists
ClassLabel              int64, with the names in the index; -1 means "no label", as in `datasets`
Array2D … Array5D       the same shape; variable-length if the first axis has no size
Image                   as in `images`: decoded, or kept with --encoded. Without --mode and --size,
                        the first image decides them; the mode is then L or RGB

dict, list of dicts     each key as a feature of its own, DICT.KEY
decimals                what --cast DICT.KEY=DTYPE says

Other features, such as Audio and Video, are an error that names them: use --drop.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import Part
from data_prep.formats.images import pixels
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.opening import naming
from data_prep.formats.samples import Unusable
from data_prep.formats.tables import tables
from data_prep.formats.tables.column_choice import listed
from data_prep.formats.tables.columns import Column
from data_prep.formats.tables.saved_dataset import Saved, column_of, kind_of, load, typed
from data_prep.options import Options, add_arguments, add_repeated, pairs
from data_prep.show import console
from data_prep.source import BadRecords, Block, Names, Piece, Source, SourceFile
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import Field
from hpctrain.shards.types import Array

SPLIT = "split"  # the name of the column that holds the split names of a DatasetDict


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="written by save_to_disk")
    group = parser.add_argument_group("huggingface")
    add_repeated(group, "--columns", "NAME,…", "take only these columns, in this order")
    add_repeated(group, "--drop", "NAME,…", "take all columns except these")
    add_repeated(group, "--cast", "NAME=DTYPE", "the dtype to store, such as price=float64")
    pixels.add_arguments(parser, mode="")
    add_arguments(parser, split="")


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.writing.convert import convert

    saved = load(args.folder)
    args.split = args.split or ("train=1" if "" in saved.splits else f"column:{SPLIT}")
    options = Options.of(args)
    images = Pixels.of(args, mode="")
    names = listed(args.columns), listed(args.drop)
    source = huggingface(saved, *names, images, options, cast=pairs("--cast", args.cast))
    convert(source, args.out, options)


@dataclass(frozen=True)
class _HuggingFace(Source):
    """See `huggingface`."""

    by_name: Mapping[str, Column | None] = field(default_factory=dict)  # None for images
    shapes: Mapping[str, Sequence[int | None]] = field(default_factory=dict)  # of array features
    images: Pixels = field(default_factory=Pixels)
    column: str = ""

    def read(self, what: tuple[str, str], reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        split, path = what
        names = [*self.by_name]
        named = self.column == SPLIT and split  # the split is that of the DatasetDict, no column
        if self.column and not named and self.column not in names:
            names.append(self.column)
        for batch, first in tables.arrow_batches(Part(path), names):
            images, arrays, bad = dict[str, Any](), dict[str, Any](), dict[int, str]()
            for name, column in self.by_name.items():
                if column is None:
                    images[name] = [self._image(name, item) for item in batch[name].to_pylist()]
                    found = {i: x for i, x in enumerate(images[name]) if isinstance(x, str)}
                else:
                    arrays[name], found = typed(batch[name], column, self.shapes.get(name))
                    found = {**column.problems(arrays[name]), **found}
                for row, why in found.items():
                    bad.setdefault(row, why)
            if self.column and not named:
                null = batch[self.column].is_null().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(null).tolist():
                    bad.setdefault(
                        row, f"column {self.column!r} is null; --split or --group goes by it"
                    )
            for row, why in sorted(bad.items()):
                reading.bad(path, f"row {first + row + 1}", why)
            kept = [row for row in range(batch.num_rows) if row not in bad]
            values: dict[str, Any] = {}
            for name, column in self.by_name.items() if kept else ():
                if column is None:
                    chosen = [images[name][row] for row in kept]
                    values[name] = chosen if self.fields[name].variable else np.stack(chosen)
                else:
                    values[name] = column.values(arrays[name].take(kept) if bad else arrays[name])
            if kept:
                yield Block(
                    values,
                    column=self._column(split, batch, kept),
                    file=path,
                    records=Names(len(kept), _row_name(first, kept)),
                )

    def _image(self, name: str, item: Mapping[str, Any] | None) -> Array | str:
        spec = self.fields[name]
        try:
            return _sample(self.images, item, None if self.images.encoded else spec)
        except Unusable as error:
            return f"column {name!r}: the image cannot be used: {error}"

    def _column(self, split: str, batch: Any, kept: Sequence[int]) -> list[str] | None:
        if not self.column:
            return None
        if split and self.column == SPLIT:
            return [split] * len(kept)
        values = batch[self.column].to_pylist()
        return [str(values[row]) for row in kept]


def huggingface(
    saved: Saved,
    columns: Sequence[str],
    drop: Sequence[str],
    images: Pixels,
    options: Options,
    *,
    cast: Mapping[str, str] | None = None,
) -> Source:
    """Make a source of the rows of a saved data set.

    Args:
        saved: See `load`.
        columns: The features to take; empty takes all.
        drop: The features to leave out, if `columns` is empty.
        images: How images become samples.
        options: The options of the conversion; a split by column is used.
        cast: The dtypes to store, by feature.

    Raises:
        ConfigError: There is no such feature.
        DataError: No field can hold a feature, or files cannot be read.
    """
    cast = cast or {}
    for name in (*columns, *drop, *cast):
        if name not in saved.features:
            raise ConfigError(
                f"there is no feature {name!r}; there are {console.listed(saved.features)}"
            )
    if columns and drop:
        raise ConfigError("--columns and --drop: give one of them")
    chosen = list(dict.fromkeys(columns)) or [n for n in saved.features if n not in drop]
    if not chosen:
        raise ConfigError("--drop leaves no feature")
    with naming([saved.folder]):
        by_name = {name: column_of(name, saved, cast.get(name, "")) for name in chosen}
    fields = {
        name: column.field if column is not None else _image_field(name, saved, images)
        for name, column in by_name.items()
    }
    categories = {
        name: list(saved.features[name].names)
        for name in chosen
        if kind_of(saved.features[name]) == "ClassLabel"
    }
    pieces = []
    for split, paths in saved.splits.items():
        for path in paths:
            file = SourceFile.of(path)
            pieces.append(Piece((split, path), (file,), bytes=file.size))
    column = options.column if options.column in (*saved.features, SPLIT) else ""
    extra = [] if "" in saved.splits or SPLIT in saved.features else [SPLIT]
    return _HuggingFace(
        name="huggingface",
        fields=fields,
        pieces=pieces,
        identity={
            "columns": chosen,
            "categories": categories,
            "splits": {split: len(paths) for split, paths in saved.splits.items()},
            "images": asdict(images),
            "cast": dict(cast),
        },
        about={
            "from": saved.folder,
            "features": {name: str(saved.features[name]) for name in chosen},
        },
        categories=categories,
        columns=[*saved.features, *extra],
        by_name=by_name,
        shapes={
            name: tuple(saved.features[name].shape)
            for name in chosen
            if kind_of(saved.features[name]).startswith("Array")
        },
        images=images,
        column=column,
    )


def _row_name(first: int, kept: Sequence[int]) -> Callable[[int], str]:
    """Return a function of the names of rows, of which `first` are in batches before this one."""
    return lambda sample: f"row {first + kept[sample] + 1}"


def _sample(images: Pixels, item: Mapping[str, Any] | None, field: Field | None = None) -> Array:
    """Return the sample of an image."""
    if item is None:
        raise Unusable("it is null")
    if item["bytes"] is None:
        raise Unusable(f"it is not in the data set but at {item['path']!r}; save it with it")
    return images.sample(item["bytes"], field)


def _image_field(name: str, saved: Saved, images: Pixels) -> Field:
    """Return the field of images: that of the options, or of the first image that can be used."""
    if images.field is not None:
        return images.field
    why = "there is none"
    for paths in saved.splits.values():
        for path in paths:
            for batch, _ in tables.arrow_batches(Part(path), [name]):
                for item in batch[name].to_pylist():
                    try:
                        image = _sample(images, item)
                        return images.field_of(image)
                    except Unusable as error:
                        why = str(error)
                break
    raise DataError(f"{saved.folder}: column {name!r}: no image can be used: {why}")
