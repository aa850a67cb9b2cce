"""Files are opened here: plain, packed, Parquet; what is wrong with one is told in a sentence."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from data_prep.formats.files import LinesOf, Part
from hpctrain.errors import DataError

BUFFER = 2**20
# How much larger text is than its compressed file, about: for the size of the shards only.
GROWTH = {".gz": 3.0, ".zst": 3.5}


@contextmanager
def opened(part: Part) -> Iterator[BinaryIO]:
    """A part's bytes, unpacked.

    Raises:
        DataError: It cannot be read or unpacked.
    """
    packing = PurePath(part.path).suffix
    try:
        if packing == ".gz":
            with gzip.open(part.path) as stream:
                yield cast(BinaryIO, stream)
        elif packing == ".zst":
            pa = pyarrow()
            # Not the library zstandard, which takes a truncated stream for a whole one.
            with (
                pa.CompressedInputStream(pa.OSFile(part.path), "zstd") as packed,
                io.BufferedReader(packed, BUFFER) as stream,
            ):
                yield cast(BinaryIO, stream)
        elif part.stop:
            with io.BufferedReader(LinesOf(*part), BUFFER) as stream:
                yield cast(BinaryIO, stream)
        else:
            with open(part.path, "rb", BUFFER) as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{part.path} cannot be read: {why}") from None


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A `ParquetFile` that reads no more than it has to.

    Raises:
        DataError: It cannot be read.
    """
    pa = pyarrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """What a library says, in one line."""
    return " ".join(str(error).split())


def pyarrow() -> Any:
    """The library.

    Raises:
        DataError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            "this needs pyarrow, which is not installed: pip install 'hpctrain[prep]'"
        ) from None
    return pyarrow
