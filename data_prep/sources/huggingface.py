"""A folder that `save_to_disk` of Hugging Face's library `datasets` has written.

    python -m data_prep huggingface cifar10/ OUT --mode RGB

A DatasetDict keeps its splits (--split column:split). All samples of a Dataset go to `train`,
unless --split says something else. The features become fields:

Value, List, Sequence   as in `table`: numbers, text as variable-length uint8, lists
ClassLabel              int64, with the names in the index; -1 means "no label", as in `datasets`
Image                   as in `images`: decoded, or kept with --encoded. Without --mode and --size,
                        the first image decides them; the mode is then L or RGB


Other features, such as Audio, Video, Array2D, are an error that names them: use --drop. So are
dicts: `dataset.flatten()` in Python makes a feature of each key, before save_to_disk.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import FileRange
from data_prep.formats.images import pixels
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.opening import ROWS, naming, one_line, pyarrow
from data_prep.formats.samples import Unusable
from data_prep.formats.tables import tables
from data_prep.formats.tables.column_choice import ColumnChoice, listed
from data_prep.formats.tables.columns import Column, Taken
from data_prep.formats.tables.csv_files import RowBatch
from data_prep.libraries import library
from data_prep.options import Options, pairs, writing
from data_prep.source import BLOCK_BYTES, BadRecords, InputSource, Piece, SampleBlock, SourceFile
from data_prep.sources.table import TableSource
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array
from hpctrain.errors import DataError

SPLIT = "split"  # the name of the column that holds the split names of a DatasetDict

ARGUMENTS = (
    """
folder=FOLDER : path
    written by save_to_disk
[huggingface]
--columns NAME,… ...
    take only these columns, in this order
--drop NAME,… ...
    take all columns except these
--cast NAME=DTYPE ...
    the dtype to store, such as price=float32
""",
    partial(pixels.add_arguments, mode=""),
    writing(""),
)
EPILOG = pixels.__doc__


@dataclass(frozen=True)
class _Saved:
    """The contents of a folder."""

    folder: str  # absolute path
    features: Mapping[str, Any]  # the library's features, by name
    schema: Any  # the Arrow schema of the files
    splits: Mapping[str, Sequence[str]]  # the files of each split; a Dataset has only the split ""


def _load(folder: Path) -> _Saved:
    """Load the description of a folder, not its data."""
    datasets = library("datasets", name="the library datasets", install="datasets")
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged description may raise anything
        why = one_line(error)
        raise DataError(f"{folder} is no folder of save_to_disk: {why}") from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
    if not splits:
        raise DataError(f"{folder} has no splits")
    first_name, first = next(iter(splits.items()))
    for name, split in splits.items():
        if split.features != first.features:
            raise DataError(f"{folder}: the splits {first_name} and {name} have other features")
    if any(split._indices is not None for split in splits.values()):
        raise DataError(
            f"{folder} has an order beside its rows, as old versions of datasets wrote it; load "
            "and save it again"
        )
    return _Saved(
        folder=str(folder.absolute()),
        features=first.features,
        schema=first.features.arrow_schema,
        splits={
            name: [file["filename"] for file in split.cache_files] for name, split in splits.items()
        },
    )


@dataclass(frozen=True)
class _Feature(Column):
    """A column of the type that the description says."""

    def taken(self, array: Any) -> tuple[dict[int, str], Taken]:
        """See `Column`."""
        if array.type != self.type:
            raise DataError(
                f"column {self.name!r}: a file has {array.type}, its description {self.type}"
            )
        return super().taken(array)


@dataclass(frozen=True)
class _Images(Column):
    """A column of images."""

    pixels: Pixels = Pixels()  # noqa: RUF009

    def taken(self, array: Any) -> tuple[dict[int, str], Taken]:
        """See `Column`."""
        field, found, problems = None if self.pixels.encoded else self.field, [], dict[int, str]()
        for row, item in enumerate(array.to_pylist()):
            found.append(image := _image(self.name, item, self.pixels, field))
            if isinstance(image, str):
                problems[row] = image

        def take(kept: Any) -> Any:
            chosen = found if kept is None else [found[row] for row in kept]
            return chosen if self.field.variable else np.stack(chosen)

        return problems, take


def _image(name: str, item: Any, pixels: Pixels, field: Field | None = None) -> Array | str:
    """Return the sample of an image, or why it cannot be used."""
    why = "it is null"
    if item is not None and item["bytes"] is None:
        why = f"it is not in the data set but at {item['path']!r}; save it with it"
    elif item is not None:
        try:
            return pixels.sample(item["bytes"], field)
        except Unusable as error:
            why = str(error)
    return f"column {name!r}: the image cannot be used: {why}"


@dataclass(frozen=True)
class _HuggingFace(TableSource):
    def read(self, what: Any, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        split, path = what
        return self.rows([FileRange(path)], reading, split if self.column == SPLIT else "")

    def _rows_of(self, part: FileRange, names: Sequence[str]) -> Iterator[RowBatch]:
        return _rows_of(part.path, names)


def _rows_of(path: str, names: Sequence[str]) -> Iterator[RowBatch]:
    """Yield the rows of an Arrow stream in batches of a few MB."""
    pa, first = pyarrow(), 1
    SourceFile.of(path)
    try:
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                batch = tables.checked(batch, names)
                count = max(1, min(ROWS, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes)))
                for start in range(0, batch.num_rows, count):
                    yield RowBatch(batch.slice(start, count), partial(add, first + start))
                first += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Arrow: {one_line(error)}") from None


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the rows of a saved data set."""
    saved, images = _load(args.folder), Pixels.of(args, mode="")
    choice = ColumnChoice(listed(args.columns), listed(args.drop), cast=pairs("--cast", args.cast))
    own = "" if "" in saved.splits else SPLIT
    column = (own if options.by_own else "") or options.column
    with naming([saved.folder]):
        chosen = choice.choose(list(saved.features))
        columns = {name: _column(name, saved, choice.cast.get(name, ""), images) for name in chosen}
    categories = {
        name: list(saved.features[name].names)
        for name in chosen
        if type(saved.features[name]).__name__ == "ClassLabel"
    }
    files = [
        (split, SourceFile.of(path)) for split, paths in saved.splits.items() for path in paths
    ]
    return _HuggingFace(
        name="huggingface",
        fields={name: column.field for name, column in columns.items()},
        pieces=[Piece((split, file.path), (file,), bytes=file.size) for split, file in files],
        identity={
            "columns": chosen,
            "categories": categories,
            "splits": {split: len(paths) for split, paths in saved.splits.items()},
            "images": asdict(images),
            "cast": dict(choice.cast),
        },
        about={
            "from": saved.folder,
            "features": {name: str(saved.features[name]) for name in chosen},
        },
        categories=categories,
        columns=list(dict.fromkeys([*saved.features, *([own] if own else [])])),
        fields_of={name: (column,) for name, column in columns.items()},
        own=own,
        column=column if column in (*saved.features, SPLIT) else "",
    )


def _column(name: str, saved: _Saved, cast: str, images: Pixels) -> Column:
    feature, kind = saved.features[name], saved.schema.field(name).type
    if type(feature).__name__ == "Image":
        return _Images(name, kind, _image_field(name, saved, images), pixels=images)
    return _Feature.of(name, kind, cast)


def _image_field(name: str, saved: _Saved, images: Pixels) -> Field:
    """Return the field of images: that of the options, or of the first image that can be used."""
    if images.field is not None:
        return images.field
    why = f"column {name!r}: there is no image"
    for path in (path for paths in saved.splits.values() for path in paths):
        for rows in _rows_of(path, [name]):
            for item in rows.batch[name].to_pylist():
                if not isinstance(image := _image(name, item, images), str):
                    return images.field_of(image)
                why = image
            break
    raise DataError(f"{saved.folder}: {why}")
