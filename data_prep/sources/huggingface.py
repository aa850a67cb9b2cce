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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats import nested, pixels, tables
from data_prep.formats.column_choice import listed, pairs
from data_prep.formats.columns import Column
from data_prep.formats.files import Part
from data_prep.formats.opening import naming, one_line
from data_prep.formats.pixels import Pixels
from data_prep.formats.samples import Unusable
from data_prep.options import Options, add_arguments
from data_prep.show import console
from data_prep.source import BadRecords, Block, Piece, Source, SourceFile
from data_prep.split import ByColumn
from hpctrain.data.field import Field
from hpctrain.data.ragged import offsets_of
from hpctrain.data.types import Array
from hpctrain.errors import ConfigError, DataError

SPLIT = "split"  # the name of the column that holds the split names of a DatasetDict


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="written by save_to_disk")
    group = parser.add_argument_group("huggingface")
    group.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="NAME,…",
        help="take only these columns, in this order",
    )
    group.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME,…",
        help="take all columns except these",
    )
    group.add_argument(
        "--cast",
        action="append",
        default=[],
        metavar="NAME=DTYPE",
        help="the dtype to store, such as price=float64",
    )
    pixels.add_arguments(parser, mode="")
    add_arguments(parser, split="")


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.convert import convert

    saved = load(args.folder)
    args.split = args.split or ("train=1" if "" in saved.splits else f"column:{SPLIT}")
    options = Options.of(args)
    images = Pixels.of(args, mode="")
    names = listed(args.columns), listed(args.drop)
    source = huggingface(saved, *names, images, options, cast=pairs("--cast", args.cast))
    convert(source, args.out, options)


@dataclass(frozen=True)
class Saved:
    """The contents of a folder.

    Attributes:
        folder: Absolute path.
        features: The library's features, by name. Those in a dict have the names DICT.KEY.
        schema: The Arrow schema of the files, and of the members of structs.
        splits: The files of each split; a Dataset has only the split "".
    """

    folder: str
    features: Mapping[str, Any]
    schema: Any
    splits: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class HuggingFace(Source):
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
                    arrays[name], found = _typed(batch[name], column, self.shapes.get(name))
                    found = {**column.problems(arrays[name]), **found}
                for row, why in found.items():
                    bad.setdefault(row, why)
            if self.column and not named:
                null = batch[self.column].is_null().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(null).tolist():
                    bad.setdefault(row, f"column {self.column!r} is null; --split goes by it")
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
                    records=tables.RowNames(kept, partial(add, first + 1)),
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


def load(folder: Path) -> Saved:
    """Load the description of a folder, not its data.

    Raises:
        DataError: `save_to_disk` has not written the folder, or the library is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            "this needs the library datasets, which is not installed: pip install datasets"
        ) from None
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged description may raise anything
        why = one_line(error)
        raise DataError(f"{folder} is no folder of save_to_disk: {why}") from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
    if not splits:
        raise DataError(f"{folder} has no splits")
    (first_name, first), *others = splits.items()
    for name, split in others:
        if split.features != first.features:
            raise DataError(f"{folder}: the splits {first_name} and {name} have other features")
    for split in splits.values():
        if split._indices is not None:
            raise DataError(
                f"{folder} has an order beside its rows, as old versions of datasets wrote it; "
                "load and save it again"
            )
    features: dict[str, Any] = {}
    for name, feature in first.features.items():
        members = _members(name, feature)
        if twice := sorted(features.keys() & members.keys()):
            raise DataError(f"{folder} has the feature {twice[0]!r} twice; rename one of them")
        features |= members
    return Saved(
        folder=str(folder.absolute()),
        features=features,
        schema=nested.with_nodes(first.features.arrow_schema),
        splits={
            name: [file["filename"] for file in split.cache_files] for name, split in splits.items()
        },
    )


def _members(name: str, feature: Any) -> dict[str, Any]:
    """Return a feature; those in a dict, or in a list of dicts, have the names DICT.KEY."""
    found: dict[str, Any] = {}
    if isinstance(feature, dict):
        for key, member in feature.items():
            found |= _members(f"{name}.{key}", member)
    elif isinstance(inside := getattr(feature, "feature", None), dict):  # a list of dicts
        for key, member in inside.items():
            found |= _members(f"{name}.{key}", replace(feature, feature=member))
    return found or {name: feature}


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
        by_name = {name: _column_of(name, saved, cast.get(name, "")) for name in chosen}
    fields = {
        name: column.field if column is not None else _image_field(name, saved, images)
        for name, column in by_name.items()
    }
    categories = {
        name: list(saved.features[name].names)
        for name in chosen
        if _kind(saved.features[name]) == "ClassLabel"
    }
    pieces = []
    for split, paths in saved.splits.items():
        for path in paths:
            file = SourceFile.of(path)
            pieces.append(Piece((split, path), (file,), bytes=file.size))
    column = options.split.column if isinstance(options.split, ByColumn) else ""
    extra = [] if "" in saved.splits or SPLIT in saved.features else [SPLIT]
    return HuggingFace(
        name="huggingface",
        fields=fields,
        pieces=pieces,
        identity={
            "columns": chosen,
            "categories": categories,
            "splits": {split: len(paths) for split, paths in saved.splits.items()},
            "images": images.identity(),
            **({"cast": dict(cast)} if cast else {}),
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
            if _kind(saved.features[name]).startswith("Array")
        },
        images=images,
        column=column,
    )


def _column_of(name: str, saved: Saved, cast: str) -> Column | None:
    """Return the column of a feature, or None if it holds images."""
    import pyarrow as pa

    feature, kind = saved.features[name], saved.schema.field(name).type
    if _kind(feature) == "Image":
        return None
    if _kind(feature).startswith("Array"):
        kind = pa.from_numpy_dtype(feature.dtype)
        for size in reversed(feature.shape):
            kind = pa.list_(kind, -1 if size is None else size)
    return Column.of(name, kind, cast)


def _typed(
    array: Any, column: Column, shape: Sequence[int | None] | None
) -> tuple[Any, dict[int, str]]:
    """Convert an array to its column's type; also return the rows of another shape, set to null.

    The library stores array features (those with a `shape`) as nested lists of any lengths.
    """
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if shape is None:
        if array.type != column.type:
            raise DataError(
                f"column {column.name!r}: a file has {array.type}, its description {column.type}"
            )
        return array, {}
    good, level, rows = np.ones(len(array), bool), array, np.arange(len(array))
    for size in shape:
        lengths = np.asarray(compute.list_value_length(level).fill_null(-1))
        good[rows[lengths < 0 if size is None else lengths != size]] = False
        level, rows = level.flatten(), np.repeat(rows, np.maximum(lengths, 0))
    valid = np.asarray(array.is_valid())
    bad = {
        row: f"column {column.name!r} is no array of shape {list(column.field.shape)}"
        for row in np.flatnonzero(valid & ~good).tolist()
    }
    chosen = array.filter(pa.array(good))
    leaves = chosen
    for _ in shape:
        leaves = leaves.flatten()
    for size in reversed(shape[1:]):
        leaves = pa.FixedSizeListArray.from_arrays(leaves, size)
    if shape[0] is None:
        ends = offsets_of(np.asarray(compute.list_value_length(chosen)))
        leaves = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), leaves)
    else:
        leaves = pa.FixedSizeListArray.from_arrays(leaves, shape[0])
    return leaves.take(pa.array(np.cumsum(good) - 1, mask=~good)), bad


def _kind(feature: Any) -> str:
    return type(feature).__name__


def _sample(images: Pixels, item: Mapping[str, Any] | None, field: Field | None = None) -> Array:
    """Return the sample of an image.

    Raises:
        Unusable: See `Pixels.sample`. Or the image is missing.
    """
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
