"""The format of mosaicml-streaming, MDS version 2, read without the library.

index.json lists the shards, with names and encodings of the columns. A shard, raw or compressed:

    count           uint32
    begins          uint32 (count + 1,): where each sample begins, and where the last ends
    …               a header that index.json repeats
    samples         uint32 sizes of the values that have no fixed one, then all values
"""

import bz2
import json
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.samples import Unusable
from data_prep.source import SourceFile
from hpctrain.errors import DataError

INDEX = "index.json"
SCALARS = frozenset(
    (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
)

# How a value of an ndarray without a fixed dtype says it; and the sizes of its shape.
DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Column:
    """Of a shard: its encoding, and its size if all values have the same."""

    name: str
    encoding: str
    size: int

    @property
    def kind(self) -> str:
        """The encoding without its parameters."""
        return self.encoding.partition(":")[0]


@dataclass(frozen=True)
class Shard:
    """An .mds file.

    Attributes:
        file: Raw or compressed.
        compression: "", or as its writer was told, such as "zstd:3".
        samples: How many.
        bytes: Of the raw file.
        folder: That it is in, when each is a split.
    """

    file: SourceFile
    compression: str
    samples: int
    bytes: int
    folder: str


def shards_of(folder: Path, name: str) -> Iterator[tuple[Shard, tuple[Column, ...]]]:
    """Yield the shards that an index lists.

    Raises:
        DataError: It is damaged, or a shard is missing.
    """
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
        for entry in content["shards"]:
            if entry["format"] != "mds" or entry["version"] != 2:
                raise DataError(
                    f"{path}: a shard has the format {entry['format']!r}, version "
                    f"{entry['version']}; mds of version 2 is read"
                )
            columns = zip(
                entry["column_names"],
                entry["column_encodings"],
                entry["column_sizes"],
                strict=True,
            )
            raw, packed = entry["raw_data"], entry["zip_data"]
            names = [str(info["basename"]) for info in (raw, packed) if info]
            for basename in names:
                if Path(basename).name != basename:
                    raise DataError(f"{path}: the shard {basename!r} leads out of the folder")
            there = (folder / names[0]).exists() or not packed
            file = SourceFile.of(folder / names[0 if there else 1])
            compression = "" if there else str(entry["compression"])
            yield (
                Shard(file, compression, int(entry["samples"]), int(raw["bytes"]), name),
                tuple(
                    Column(str(n), str(encoding), int(size or 0)) for n, encoding, size in columns
                ),
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path} is no index of MDS: {what}") from None


def samples(shard: Shard) -> Iterator[bytes]:
    """Yield a shard's samples, encoded.

    Raises:
        DataError: It is damaged.
    """
    path = shard.file.path
    try:
        with open(path, "rb") as file:
            content: Any = b""
            if shard.compression:
                content = _decompressed(file.read(), shard)
            elif shard.file.size:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    head = 4 * (shard.samples + 2)  # the count, and where each sample begins, and the end
    ends = np.frombuffer(content[:head], "<u4", count=min(head, len(content)) // 4).astype(int)
    if (
        len(content) != shard.bytes
        or len(ends) != shard.samples + 2
        or ends[0] != shard.samples
        or ends[1] < head
        or ends[-1] > len(content)
        or (np.diff(ends[1:]) < 0).any()
    ):
        raise DataError(
            f"{path} is damaged: {INDEX} lists {shard.samples} samples, {shard.bytes} bytes; it "
            f"has {len(content)} bytes, and its header says {ends[0] if len(ends) else 'nothing'}"
        )
    for start, stop in zip(ends[1:-1].tolist(), ends[2:].tolist(), strict=True):
        yield content[start:stop]


def _decompressed(content: bytes, shard: Shard) -> bytes:
    """The raw file.

    Raises:
        DataError: It is damaged, or compressed otherwise.
    """
    kind = shard.compression.partition(":")[0]
    limit = shard.bytes + 1  # whoever says less than there is shall not fill the memory
    try:
        if kind in ("gz", "bz2"):
            stream: Any = zlib.decompressobj(31) if kind == "gz" else bz2.BZ2Decompressor()
            raw: bytes = stream.decompress(content, limit)
            if not stream.eof:
                raise ValueError("its end is not where it should be")
            return raw
        if kind == "zstd":
            import zstandard

            try:
                return zstandard.ZstdDecompressor().stream_reader(content).read(limit)
            except zstandard.ZstdError as error:
                raise ValueError(error) from None
    except ImportError:
        raise DataError(
            "zstd needs zstandard, which is not installed: pip install 'hpctrain[prep]'"
        ) from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{shard.file.path} is damaged: {error}") from None
    raise DataError(f"{shard.file.path} is compressed by {kind!r}; gz, bz2 and zstd are read")


def columns_of(sample: bytes, layout: Sequence[Column]) -> dict[str, bytes]:
    """Cut a sample into its values, encoded.

    Raises:
        Unusable: It is damaged.
    """
    varying = sum(not column.size for column in layout)
    head = np.frombuffer(sample[: 4 * varying], "<u4", count=min(varying, len(sample) // 4))
    sizes, parts, start = iter(head.tolist()), dict[str, bytes](), 4 * varying
    for column in layout:
        size = column.size or next(sizes, 0)
        parts[column.name] = sample[start : start + size]
        start += size
    if start != len(sample):
        raise Unusable(f"it has {len(sample)} bytes, its columns say {start}")
    return parts


def decode(column: Column, part: bytes) -> Any:
    """Return a value that is neither image nor JSON; text and bytes as bytes.

    Raises:
        Unusable: It is damaged.
    """
    kind = column.kind
    try:
        if kind in SCALARS or kind == "int":
            dtype = np.dtype("int64" if kind == "int" else kind).newbyteorder("<")
            (value,) = np.frombuffer(part, dtype)
            return value
        if kind == "ndarray":
            return _array(column.encoding.split(":")[1:], part)
        if kind == "bytes":
            return part
        text = part.decode()
        return int(text) if kind == "str_int" else float(text) if kind == "str_float" else part
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Unusable(f"it is damaged: {error}") from None


def _array(parameters: Sequence[str], part: bytes) -> Any:
    """An ndarray; what the encoding does not fix, the value itself says first."""
    start = 0
    if parameters:
        dtype = np.dtype(parameters[0])
    else:
        dtype, start = np.dtype(DTYPES[part[0]]), 1
    if len(parameters) > 1:
        shape = [int(size) for size in parameters[1].split(",")]
    else:
        ndim, width = part[start] >> 2, 2 ** (part[start] & 3)
        end = start + 1 + ndim * width
        shape = np.frombuffer(part[start + 1 : end], f"<u{width}").tolist()
        start = end
    return np.frombuffer(part[start:], dtype.newbyteorder("<")).reshape(shape)
