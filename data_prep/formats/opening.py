"""Open files, plain or compressed or Parquet, with errors that say in a sentence what is wrong."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from data_prep.formats.files import FileRange, lines_of
from data_prep.libraries import library
from data_prep.source import BLOCK_BYTES, SourceFile
from hpctrain.base.errors import ConfigError, DataError, about

_BUFFER = 2**20
ROWS = 2**16  # rows of a table that are read at once, at most
OTHERS = (
    "write a function that reads it and yields samples, for `python -m data_prep python "
    "FILE.py:function OUT` (docs/data.md)"
)
# Size of text relative to its compressed file: an estimate, only used for the size of the shards.
GROWTH = {".gz": 3.0, ".zst": 3.5}


def kind_of(path: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind that a file's suffix has, or "", and its packing: .gz, .zst or ""."""
    name = PurePath(path)
    packing = name.suffix if name.suffix in GROWTH else ""
    return kinds.get(PurePath(name.stem).suffix if packing else name.suffix, ""), packing


@contextmanager
def opened(part: FileRange) -> Iterator[BinaryIO]:
    """Yield the decompressed bytes of a file, from the first line of a part on; see `lines_of`."""
    packing = PurePath(part.path).suffix
    SourceFile.of(part.path)
    try:
        if packing in GROWTH and not os.path.getsize(part.path):
            raise EOFError("it is empty, so it was cut off")  # gzip takes it for no text
        if packing == ".gz":
            with gzip.open(part.path) as stream:
                yield cast(BinaryIO, stream)
        elif packing == ".zst":
            pa = pyarrow()
            # The library zstandard is not used: it reads a truncated stream without an error.
            with (
                pa.CompressedInputStream(pa.OSFile(part.path), "zstd") as packed,
                io.BufferedReader(packed, _BUFFER) as stream,
            ):
                yield cast(BinaryIO, stream)
        else:
            with open(part.path, "rb", _BUFFER) as stream:
                stream.seek(lines_of(part)[0])
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{part.path} cannot be read: {why}") from None


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a `ParquetFile` that reads no more than it has to."""
    pa = pyarrow()
    SourceFile.of(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
        ) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}") from None


def parquet_rows(
    table: Any, part: FileRange, columns: Sequence[str], most: int = ROWS
) -> Iterator[tuple[Any, int]]:
    """Yield each batch of some row groups, about a block, with the number of rows before it."""
    of = range(part.start, part.stop or table.num_row_groups)
    groups = [table.metadata.row_group(group) for group in range(of.stop)]
    first = sum(group.num_rows for group in groups[: part.start])
    left = sum(group.num_rows for group in groups[part.start :])
    size = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    count = min(most, max(1, BLOCK_BYTES // max(1, size)))
    for batch in table.iter_batches(count, row_groups=[*of], columns=[*dict.fromkeys(columns)]):
        yield batch, first
        first, left = first + batch.num_rows, left - batch.num_rows
    if left:
        raise DataError(
            f"{part.path} is damaged: {abs(left)} rows "
            f"{'are missing' if left > 0 else 'are too many'}"
        )


@contextmanager
def naming(paths: Sequence[str]) -> Iterator[None]:
    """Add the first of these files, if there is one, to an error that names none of them."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not paths or any(path in str(error) for path in paths):
            raise
        raise about(paths[0], error) from None


def one_line(error: Exception) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())


def pyarrow() -> Any:
    """Return the library pyarrow."""
    return library("pyarrow")


def is_utf8(content: bytes) -> bool:
    """Return whether bytes are text."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
