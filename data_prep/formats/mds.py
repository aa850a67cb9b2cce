"""A reader of MDS version 2, the format of mosaicml-streaming.

The library itself (0.13) is not used. It does not compare the digests of raw shards, even if
`validate_hash` asks for it, and reads compressed shards only by writing decompressed copies beside
them. It needs numpy below 2.2 and transformers below 5. Importing it loads torch and torchvision in
every worker process (5 s and 250 MB each).

index.json lists the shards, with the names and encodings of the columns. A shard, raw or
compressed, is:

    count           uint32
    begins          uint32 (count + 1,): byte offset of each sample, and of the end of the last
    …               a header that index.json repeats
    samples         each: uint32 sizes of the values without a fixed size, then all values
"""

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep.formats.opening import one_line, pyarrow
from data_prep.formats.samples import Unusable
from data_prep.source import SourceFile, content_of, readable
from hpctrain.disk import parse_json
from hpctrain.errors import DataError

INDEX = "index.json"
SCALARS = frozenset(
    (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
)
_PACKED = {"gz": "gzip", "bz2": "bz2", "zstd": "zstd"}  # pyarrow's names of the compressions

# The codes of the dtypes in the values of an ndarray column that has no fixed dtype.
DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Column:
    """A column of a shard: its encoding, and the bytes of a value (0 if they vary)."""

    name: str
    encoding: str
    size: int

    @property
    def kind(self) -> str:
        """The encoding without its parameters."""
        return self.encoding.partition(":")[0]


@dataclass(frozen=True)
class Shard:
    """An .mds file."""

    file: SourceFile  # the file, raw or compressed
    compression: str  # "" for a raw file, otherwise the name in the index, such as "zstd:3"
    samples: int  # number of samples
    bytes: int  # size of the raw file
    folder: str  # name of its folder if each folder is a split, otherwise ""
    # The digests that the index has, as hexadecimal text by the algorithm's name, of the content of
    # `file`, and then of the raw file.
    digests: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})


def shards_of(folder: Path, name: str) -> Iterator[tuple[Shard, tuple[Column, ...]]]:
    """Yield the shards that an index lists, each with its columns."""
    path = folder / INDEX
    try:
        content = parse_json(content_of(path))
        for entry in content["shards"]:
            if entry["format"] != "mds" or entry["version"] != 2:
                raise DataError(
                    f"{path}: a shard has the format {entry['format']!r}, version "
                    f"{entry['version']}; mds of version 2 is read"
                )
            columns = zip(
                entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
            )
            raw, packed = entry["raw_data"], entry["zip_data"]
            for info in filter(None, (raw, packed)):
                if Path(str(info["basename"])).name != str(info["basename"]):
                    raise DataError(
                        f"{path}: the shard {info['basename']!r} leads out of the folder"
                    )
            is_packed = bool(packed) and not (folder / str(raw["basename"])).exists()
            shard = Shard(
                file=SourceFile.of(folder / str((packed if is_packed else raw)["basename"])),
                compression=str(entry["compression"]) if is_packed else "",
                samples=int(entry["samples"]),
                bytes=int(raw["bytes"]),
                folder=name,
                digests=(_digests(packed) if is_packed else {}, _digests(raw)),
            )
            yield shard, tuple(Column(str(n), str(of), int(size or 0)) for n, of, size in columns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path} is no index of MDS: {what}") from None


def _digests(info: Mapping[str, Any]) -> dict[str, str]:
    return dict(info.get("hashes") or {})


def samples(shard: Shard) -> Iterator[bytes]:
    """Yield the encoded samples of a shard."""
    path = shard.file.path
    with readable(path), open(path, "rb") as file:
        content: Any = b""
        if shard.compression:
            content = file.read()
            _check_digests(path, content, shard.digests[0])
            content = _decompressed(content, shard)
        elif shard.file.size:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    head = 4 * (shard.samples + 2)  # bytes of the count and of all byte offsets
    ends = np.frombuffer(content[:head], "<u4", count=min(head, len(content)) // 4).astype(int)
    whole = len(content) == shard.bytes and len(ends) == shard.samples + 2
    if (
        not (whole and ends[0] == shard.samples and head <= ends[1] <= ends[-1] <= len(content))
        or (np.diff(ends[1:]) < 0).any()
    ):
        raise DataError(
            f"{path} is damaged: {INDEX} lists {shard.samples} samples, {shard.bytes} bytes; it "
            f"has {len(content)} bytes, and its header says {ends[0] if len(ends) else 'nothing'}"
        )
    _check_digests(path, content, shard.digests[1])
    for start, stop in zip(ends[1:-1].tolist(), ends[2:].tolist(), strict=True):
        yield content[start:stop]


def _check_digests(path: str, content: Any, digests: Mapping[str, str]) -> None:
    """Check the digests that the index has; mosaicml-streaming knows those of two libraries."""
    for name, listed in digests.items():
        try:
            known = name in xxhash.algorithms_available
            found = getattr(xxhash, name)() if known else hashlib.new(name)
            found.update(content)
            digest = found.hexdigest()
        except (ValueError, TypeError):
            raise DataError(f"{path}: {INDEX} has a digest of unknown kind, {name!r}") from None
        if digest != listed:
            raise DataError(f"{path} is damaged: its {name} is {digest}, {INDEX} lists {listed}")


def _decompressed(content: bytes, shard: Shard) -> Any:
    """Return the decompressed content of a shard."""
    kind = shard.compression.partition(":")[0]
    if kind not in _PACKED:
        raise DataError(f"{shard.file.path} is compressed by {kind!r}; gz, bz2 and zstd are read")
    pa = pyarrow()
    try:
        with pa.CompressedInputStream(pa.BufferReader(content), _PACKED[kind]) as stream:
            # A file that expands to more than the index says is damaged.
            return stream.read(shard.bytes + 1)
    except OSError as error:
        raise DataError(f"{shard.file.path} is damaged: {one_line(error)}") from None


def columns_of(sample: bytes, layout: Sequence[Column]) -> dict[str, bytes]:
    """Cut a sample into its encoded values."""
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
    """Decode a value that is neither an image nor JSON. Text and bytes are returned as bytes."""
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
    """Decode an ndarray. A dtype or shape that the encoding does not fix is stored before it."""
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
