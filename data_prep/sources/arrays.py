"""NumPy files as fields: each .npy is a field named as the file, each .npz gives its keys.

The first axis is the sample.

Options go before or after FILE… OUT, not between them. bool is stored as uint8, other byte orders
as little-endian; values never change. A .npy file is mapped, so that it may be larger than
memory; an .npz is read whole.
"""

import argparse
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.options import Options, add_arguments
from data_prep.source import Block, Piece, Reading, Source, SourceFile
from hpctrain.data.index import Field
from hpctrain.data.ragged import Array
from hpctrain.errors import ConfigError, DataError

BLOCK_BYTES = 8 * 2**20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".npy or .npz")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="a .npy file as the field NAME (may be repeated)",
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Do it; see `convert`."""
    from data_prep.convert import convert

    options = Options.of(args)
    convert(arrays(args.files, args.field, options), args.out, options)


class _Input(NamedTuple):
    file: str  # the path, or PATH[KEY]
    array: Array


@dataclass(frozen=True)
class Arrays(Source):
    """See `arrays`."""

    files: tuple[Path, ...] = ()
    named: tuple[str, ...] = ()
    step: int = 1

    def read(self, what: tuple[int, int], reading: Reading) -> Iterator[Block]:
        """See `Source`."""
        inputs = dict(_inputs(self.files, self.named))
        first, last = what
        for start in range(first, last, self.step):
            stop = min(start + self.step, last)
            yield Block(
                {name: _storable(i.array[start:stop]) for name, i in inputs.items()},
                file=next(iter(inputs.values())).file,
                records=_Numbers(start, stop),
            )


class _Numbers(Sequence[str]):
    """`row 17`, made when it is asked for."""

    def __init__(self, start: int, stop: int) -> None:
        self._rows = range(start, stop)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return f"row {self._rows[i]}"


def arrays(files: Sequence[Path], named: Sequence[str], options: Options) -> Source:
    """A source of NumPy files with the same first axis, the sample.

    Args:
        files: .npy, the file's stem names the field; .npz, its keys do.
        named: "NAME=FILE.npy".
        options: How much makes a piece.

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
    in_piece = max(1, options.shard_bytes // row_bytes)
    paths = [*files, *(Path(text.partition("=")[2]) for text in named)]
    sources = tuple(SourceFile.of(path) for path in paths)
    ends = [(start, min(start + in_piece, total)) for start in range(0, total, in_piece)]
    return Arrays(
        name="arrays",
        fields=fields,
        pieces=[Piece((a, b), sources, samples=b - a, bytes=(b - a) * row_bytes) for a, b in ends],
        about={"from": {name: str(Path(i.file).absolute()) for name, i in inputs.items()}},
        files=tuple(files),
        named=tuple(named),
        step=max(1, BLOCK_BYTES // row_bytes),
    )


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
