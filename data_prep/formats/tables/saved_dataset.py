"""A folder that `save_to_disk` of Hugging Face's library `datasets` has written: what it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.opening import one_line
from data_prep.formats.tables import nested
from data_prep.formats.tables.columns import Column
from data_prep.libraries import library
from hpctrain.errors import DataError
from hpctrain.shards.ragged import offsets_of


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


def load(folder: Path) -> Saved:
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


def kind_of(feature: Any) -> str:
    """Return the name of a feature's kind, such as "ClassLabel" or "Array2D"."""
    return type(feature).__name__


def column_of(name: str, saved: Saved, cast: str) -> Column | None:
    """Return the column of a feature, or None if it holds images."""
    import pyarrow as pa

    feature, kind = saved.features[name], saved.schema.field(name).type
    if kind_of(feature) == "Image":
        return None
    if kind_of(feature).startswith("Array"):
        kind = pa.from_numpy_dtype(feature.dtype)
        for size in reversed(feature.shape):
            kind = pa.list_(kind, -1 if size is None else size)
    return Column.of(name, kind, cast)


def typed(
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
