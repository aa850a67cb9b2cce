"""NumPy files as fields: `images.npy` is the field `images`, an .npz gives each of its keys.

A .npy file is mapped, so that it may be larger than memory; an .npz is read whole.
"""

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.convert import Array, Batch, Source
from data_prep.split import Split
from hpctrain.data.index import Field
from hpctrain.errors import ConfigError, DataError

BATCH_BYTES = 8 * 2**20


class _Input(NamedTuple):
    file: str  # the path, or PATH[KEY]
    array: Array


def arrays(files: Sequence[Path], named: Sequence[str], split: Split) -> Source:
    """A source of NumPy files with the same first axis, the sample.

    bool is stored as uint8, other byte orders as little-endian; values never change.

    Args:
        files: .npy, the file's stem names the field; .npz, its keys do.
        named: "NAME=FILE.npy".
        split: By a hash of the sample's number.

    Raises:
        ConfigError: No file, or two fields with the same name.
        DataError: A file is missing or not readable, has a dtype or shape that cannot be
            stored, or another number of samples than the rest.
    """
    inputs: dict[str, _Input] = {}
    for name, item in _inputs(files, named):
        if name in inputs:
            raise ConfigError(
                f"{inputs[name].file} and {item.file} would both be the field {name!r}; "
                "--field NAME=FILE.npy gives another name"
            )
        inputs[name] = item
    if not inputs:
        raise ConfigError("give at least one .npy or .npz file before OUT, or --field NAME=FILE")
    total = _count(inputs)
    first: dict[str, Array] = {name: _storable(i.array[:1]) for name, i in inputs.items()}
    fields = {}
    for name, item in inputs.items():
        array = first[name]
        try:
            fields[name] = Field(array.dtype.newbyteorder("=").name, array.shape[1:])
        except DataError as error:
            raise DataError(f"{item.file}: {error}") from None
    row_bytes = sum(array.nbytes for array in first.values())
    step = max(1, BATCH_BYTES // row_bytes)

    def batches() -> Iterator[tuple[str, Batch]]:
        for start in range(0, total, step):
            stop = min(start + step, total)
            block = {name: _storable(i.array[start:stop]) for name, i in inputs.items()}
            if len(split.fractions) == 1:
                yield next(iter(split.fractions)), block
                continue
            place = np.array([split.of(i.to_bytes(8, "little")) for i in range(start, stop)])
            for part in split.fractions:
                if (rows := place == part).any():
                    yield part, {name: array[rows] for name, array in block.items()}

    about = {
        "files": {name: str(Path(i.file).absolute()) for name, i in inputs.items()},
        "split": split.fractions,
    }
    return Source("arrays", fields, batches, total, about)


def _inputs(files: Sequence[Path], named: Sequence[str]) -> Iterator[tuple[str, _Input]]:
    for path in files:
        if path.suffix == ".npz":
            yield from _npz(path)
        elif path.suffix == ".npy":
            yield path.stem, _npy(path)
        else:
            raise DataError(f"{path}: arrays reads .npy and .npz files")
    for text in named:
        name, equals, file = text.partition("=")
        if not (name and equals and file.endswith(".npy")):
            raise ConfigError(f"--field {text!r} is not NAME=FILE.npy")
        yield name, _npy(Path(file))


def _npy(path: Path) -> _Input:
    try:
        return _Input(str(path), np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from None


def _npz(path: Path) -> Iterator[tuple[str, _Input]]:
    try:
        with np.load(path, allow_pickle=False) as content:
            for name in content.files:
                yield name, _Input(f"{path}[{name}]", content[name])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{path} cannot be read: {error.strerror}")
    if any(words in str(error) for words in ("Python objects", "Object arrays", "allow_pickle")):
        return DataError(
            f"{path} holds Python objects (dtype object) or is not a NumPy file; save arrays of "
            "numbers"
        )
    return DataError(f"{path} is not a readable NumPy file: {error}")


def _count(inputs: dict[str, _Input]) -> int:
    """The number of samples, which all inputs share."""
    for item in inputs.values():
        if item.array.ndim == 0:
            raise DataError(f"{item.file} is a single number; the first axis is the sample")
    first, *others = inputs.values()
    for item in others:
        if len(item.array) != len(first.array):
            raise DataError(
                f"{first.file} has {len(first.array)} samples, {item.file} has {len(item.array)}; "
                "the first axis is the sample"
            )
    if not len(first.array):
        raise DataError(f"{first.file} has no samples")
    return len(first.array)


def _storable(array: Array) -> Array:
    return array.view(np.uint8) if array.dtype == bool else array
