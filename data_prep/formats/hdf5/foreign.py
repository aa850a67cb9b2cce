"""Check whether the datasets of an HDF5 file that another program wrote can be fields."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py

from data_prep.formats.arrays.array_hdf5 import names_of
from data_prep.formats.hdf5.groups import has_wildcard
from data_prep.formats.hdf5.hdf5_storage import Written, of_another_program
from hpctrain.base.errors import DataError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.storage.layout import Elsewhere, dtype_of, find

_LISTED = 20  # datasets that a message lists
_CONVERT = "`python -m data_prep python FILE.py:function OUT` can convert it"


@dataclass(frozen=True)
class FieldSource:
    """The datasets that shall be a field."""

    dataset: str  # path of the values in the file
    offsets: str = ""  # path of the offsets of a variable-length field, or ""
    axis: int = 0  # the axis that counts the samples; negative ones count from the end
    unwritten: bool = False  # whether the fill value may stand for values that were never written


def _open_file(path: Path | str) -> h5py.File:
    """Open a file for reading. Where there are locks, also check that no process writes it."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path} is not a file")
    try:
        return h5py.File(path, "r", locking="best-effort")
    except (OSError, RuntimeError) as error:
        locked = any(words in str(error) for words in ("unable to lock", "already open"))
        cure = "; close it where it is written, or `h5clear -s` it" if locked else ""
        raise DataError(f"{path} is not readable as HDF5: {error}{cure}") from None


def look(path: Path | str, sources: Mapping[str, FieldSource]) -> tuple[dict[str, Field], int]:
    """Return the schema and the number of samples of a file without reading its data."""
    with _open_file(path) as file:
        try:
            fields, counts = {}, {}
            for name, each in sources.items():
                try:
                    fields[name], counts[name] = _look_at(file, name, each)
                except DataError as error:
                    raise DataError(f"{path}: field {name!r}: {error}") from None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: {error}") from None
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise DataError(
            f"{path}: every field has the same number of samples; {found} (--axis NAME=K says "
            "which axis counts them)"
        )
    count = next(iter(counts.values()))
    if not count:
        raise DataError(f"{path} has no samples")
    return fields, count


def _look_at(file: h5py.File, name: str, source: FieldSource) -> tuple[Field, int]:
    dataset = _dataset(file, source.dataset)
    dtype, sizes = dtype_of(dataset), dataset.shape
    if not sizes:
        raise DataError(f"{source.dataset} is a single value; one axis has to count the samples")
    if source.offsets:
        offsets = _dataset(file, source.offsets)
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
            raise DataError(
                f"{source.offsets} is {offsets.dtype.name} {list(offsets.shape)}; offsets are "
                "whole numbers, one more than there are samples: 0, the ends of all samples"
            )
        for each in (dataset, offsets):
            Written(each).check(each.name, name, 0, accepted=source.unwritten)
        values, ends = f"{name}/values", f"{name}/offsets"
        field = Field(
            *(dtype, sizes[1:], True),
            dataset="" if source.dataset.strip("/") == values else source.dataset,
            offsets="" if source.offsets.strip("/") == ends else source.offsets,
        )
        return field, len(offsets) - 1
    axis = source.axis + len(sizes) * (source.axis < 0)
    if not 0 <= axis < len(sizes):
        raise DataError(
            f"{source.dataset} has {len(sizes)} axes, {list(sizes)}; there is no axis {source.axis}"
        )
    Written(dataset).check(dataset.name, name, axis, accepted=source.unwritten)
    place = "" if source.dataset.strip("/") == name else source.dataset
    shape = (*sizes[:axis], *sizes[axis + 1 :])
    return Field(dtype, shape, dataset=place, axis=axis), sizes[axis]


def _dataset(file: h5py.File, path: str) -> h5py.Dataset:
    """Return a dataset after checking that its values are in this file and have a valid dtype."""
    try:
        dataset = find(file, path)
    except Elsewhere as error:
        raise DataError(
            f"{path} {error}; the samples must lie in the file itself, whose digest the index has"
        ) from None
    found = file.get(path) if dataset is None else dataset
    if found is not None and (problem := of_another_program(found)):
        raise DataError(f"{path} {problem}")
    if dataset is None:
        if has_wildcard(path):
            raise DataError(
                f"an index has no patterns such as {path}, because the samples of a file lie along "
                f"an axis of a dataset; `python -m data_prep arrays OUT --field "
                f"'NAME={file.filename}:{path}'` makes a sample of each match"
            )
        group = "is a group" if found is not None else "is not there"
        raise DataError(f"{path} {group}; in this file are {_listed(file)}")
    if dataset.shape is None:
        raise DataError(f"{path} is empty (a null dataspace)")
    try:
        Field(dtype_of(dataset))
    except (TypeError, DataError) as error:  # TypeError: NumPy has no such type
        raise DataError(f"{path} holds what no field has: {error}; {_CONVERT}") from None
    return dataset


def _listed(file: h5py.File) -> str:
    found = (f"{name} {what}" for name, what in names_of(file).items())
    return few(found, _LISTED, "; ") or "no datasets"


def described(path: Path | str) -> str:
    """Return the datasets of a file with dtypes and shapes."""
    with _open_file(path) as file:
        return _listed(file)
