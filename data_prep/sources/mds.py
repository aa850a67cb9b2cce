"""A folder of mosaicml-streaming: its columns as fields. The library itself is not needed.

FOLDER/index.json, *.mds         shards, raw or compressed (gz, bz2, zstd)
FOLDER/train/index.json, …       each folder is a split, unless --split says something else

Numbers keep their dtype, int is int64, str_int int64, str_float float64; str (UTF-8) and bytes are
uint8 of variable length, ndarrays arrays; jpeg, png and pil are images. Of a json column
--column COLUMN:KEY takes a key as a field. pkl is never read: pickles run code.
"""

import argparse
import bz2
import json
import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import pixels
from data_prep.options import Options, add_arguments
from data_prep.piece import Problems
from data_prep.pixels import Pixels
from data_prep.samples import Samples, Unusable, fields_of, fit_all
from data_prep.source import Block, Piece, Reading, Source, SourceFile
from data_prep.split import ByColumn
from hpctrain.data.index import Field, check_name
from hpctrain.errors import ConfigError, DataError

INDEX = "index.json"
FOLDER = "folder"  # the column of the folders with an index each
SCALARS = frozenset(
    (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
)
IMAGES = ("jpeg", "png", "pil")
# How a value of an ndarray without a fixed dtype says it; and the sizes of its shape.
DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"),
        strict=True,
    )
)
TAKEN = ("bytes", "str", "int", "str_int", "str_float", "ndarray", "json", *IMAGES)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="COLUMN[:KEY]",
        help="take only these columns; COLUMN:KEY is a key of a json one (may be repeated)",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="FIELD",
        help="arrays of this field have different lengths (may be repeated)",
    )
    pixels.add_arguments(parser)
    add_arguments(parser, split="")


def run(args: argparse.Namespace) -> None:
    """Do it; see `convert`."""
    from data_prep.convert import convert

    given, args.split = args.split, args.split or "train=1"
    options = Options.of(args)
    source = mds(args.folder, options, Pixels.of(args), wanted=args.column, variable=args.variable)
    if not given and source.columns:
        options = replace(options, split=ByColumn(FOLDER))
    convert(source, args.out, options)


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


@dataclass(frozen=True)
class Mds(Source):
    """See `mds`."""

    layout: tuple[Column, ...] = ()
    wanted: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # field: column, key
    pixels: Pixels = field(default_factory=Pixels)

    def read(self, what: Shard, reading: Reading) -> Iterator[Block]:
        """See `Source`."""
        samples = Samples(self.fields, what.file.path, keyed=False, columned=bool(self.columns))
        for number, content in enumerate(_samples(what)):
            record = f"sample {number}"
            try:
                values = _values(content, self.layout, self.wanted, self.pixels, self.fields)
                sample = fit_all(values, self.fields)
            except Unusable as error:
                reading.bad(what.file.path, record, str(error))
                continue
            samples.add(sample, record, column=what.folder)
            if samples.full:
                yield samples.take()
        if len(samples):
            yield samples.take()


def mds(
    folder: Path,
    options: Options,
    pixels: Pixels | None = None,
    *,
    wanted: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> Source:
    """A source of MDS shards; each is a piece.

    Args:
        folder: With an index.json, or folders that have one each.
        options: What becomes of records that cannot be used.
        pixels: What becomes of images.
        wanted: "COLUMN" or "COLUMN:KEY"; empty: all columns.
        variable: Fields whose first axis varies.

    Raises:
        ConfigError: A column that is not there or cannot be stored.
        DataError: The index or a shard is missing or damaged.
    """
    pixels = pixels or Pixels()
    folders = {"": folder}
    if not (folder / INDEX).exists():
        found = sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
        folders = {path.name: path for path in found}
        if not folders:
            raise DataError(f"{folder} has no {INDEX}, and no folder in it has: it is no MDS")
    layout: tuple[Column, ...] = ()
    shards: list[Shard] = []
    for name, path in folders.items():
        if name:
            check_name(name, "split")
        for shard, columns in _index(path, name):
            if layout and columns != layout:
                raise DataError(f"{shard.file.path} has other columns than {shards[0].file.path}")
            layout = columns
            shards.append(shard)
    shards = [shard for shard in shards if shard.samples]
    if not shards:
        raise DataError(f"{folder} has no samples")
    chosen = _chosen(layout, wanted)
    fields = _first(shards, layout, chosen, pixels, Problems(options.on_error), variable)
    if unknown := sorted(set(variable) - set(fields)):
        raise ConfigError(f"--variable {unknown[0]}: the fields are {', '.join(fields)}")
    return Mds(
        name="mds",
        fields=fields,
        pieces=[Piece(s, (s.file,), samples=s.samples, bytes=s.bytes) for s in shards],
        identity={
            "layout": [asdict(column) for column in layout],
            "wanted": chosen,
            "pixels": pixels.identity(),
            "folders": [shard.folder for shard in shards],
        },
        about={"from": str(folder.absolute()), "columns": {c.name: c.encoding for c in layout}},
        columns=(FOLDER,) if "" not in folders else (),
        layout=layout,
        wanted=chosen,
        pixels=pixels,
    )


def _index(folder: Path, name: str) -> Iterator[tuple[Shard, tuple[Column, ...]]]:
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


def _chosen(layout: Sequence[Column], wanted: Sequence[str]) -> dict[str, tuple[str, str]]:
    """For each field the column, and the key of a json one.

    Raises:
        ConfigError: A column that is not there or cannot be stored.
    """
    kinds = {column.name: column.kind for column in layout}
    chosen: dict[str, tuple[str, str]] = {}
    for text in wanted or list(kinds):
        column, _, key = (text, "", "") if text in kinds else text.partition(":")
        if column not in kinds:
            raise ConfigError(f"--column {text}: there are {', '.join(kinds)}")
        kind, name = kinds[column], key or column
        others = "; --column takes only others"
        if kind == "pkl":
            raise ConfigError(f"column {column!r} holds pickles, which run code{others}")
        if (kind == "json") != bool(key):
            raise ConfigError(
                f"column {column!r} holds JSON: --column {column}:KEY takes a key{others}"
                if kind == "json"
                else f"--column {text}: the column is {kind}, which has no keys"
            )
        if kind == "uint64" or kind not in SCALARS | set(TAKEN):
            raise ConfigError(f"column {column!r} is {kind}, which no field can hold{others}")
        if name in chosen:
            raise ConfigError(f"--column: the field {name!r} is there twice")
        chosen[name] = column, key
    return chosen


def _first(
    shards: Sequence[Shard],
    layout: Sequence[Column],
    wanted: Mapping[str, tuple[str, str]],
    pixels: Pixels,
    problems: Problems,
    variable: Sequence[str],
) -> dict[str, Field]:
    """The schema, by the first sample that can be used."""
    kinds = {column.name: column.kind for column in layout}
    images = {name for name, (column, _) in wanted.items() if kinds[column] in IMAGES}
    for shard in shards:
        for number, content in enumerate(_samples(shard)):
            try:
                values = _values(content, layout, wanted, pixels, {})
                fields = fields_of(values, variable)
            except Unusable as error:
                problems.bad(shard.file.path, f"sample {number}", str(error))
                continue
            return fields | {name: pixels.field for name in images if pixels.field}
    raise DataError(f"{shards[0].file.path}: no sample can be used, as {problems.found[0]}")


def _samples(shard: Shard) -> Iterator[bytes]:
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
        if kind == "gz":
            return zlib.decompressobj(31).decompress(content, limit)
        if kind == "bz2":
            return bz2.BZ2Decompressor().decompress(content, limit)
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


def _values(
    content: bytes,
    layout: Sequence[Column],
    wanted: Mapping[str, tuple[str, str]],
    pixels: Pixels,
    fields: Mapping[str, Field],
) -> dict[str, Any]:
    """The decoded values of a sample: sizes of those without a fixed one, then all values.

    Raises:
        Unusable: It is damaged.
    """
    varying = sum(not column.size for column in layout)
    sizes = iter(
        np.frombuffer(content[: 4 * varying], "<u4", count=min(varying, len(content) // 4))
    )
    parts, start = {}, 4 * varying
    for column in layout:
        size = column.size or int(next(sizes, 0))
        parts[column.name] = column, content[start : start + size]
        start += size
    if start != len(content):
        raise Unusable(f"it has {len(content)} bytes, its columns say {start}")
    values = {}
    for name, (column_name, key) in wanted.items():
        column, part = parts[column_name]
        try:
            values[name] = _decoded(column, part, key, pixels, fields.get(name))
        except Unusable as error:
            raise Unusable(f"column {column_name!r}: {error}") from None
        except (ValueError, KeyError, IndexError, RecursionError) as error:
            raise Unusable(f"column {column_name!r} is damaged: {error}") from None
    return values


def _decoded(column: Column, part: bytes, key: str, pixels: Pixels, spec: Field | None) -> Any:
    kind = column.kind
    if kind in SCALARS or kind == "int":
        return np.frombuffer(part, np.dtype("int64" if kind == "int" else kind).newbyteorder("<"))[
            0
        ]
    if kind == "ndarray":
        return _array(column.encoding.split(":")[1:], part)
    if kind in ("jpeg", "png"):
        return pixels.sample(part, spec)
    if kind == "pil":
        return _pil(part, pixels)
    if kind == "bytes":
        return part
    text = part.decode()  # UnicodeDecodeError is a ValueError
    if kind == "str_int":
        return int(text)
    if kind == "str_float":
        return float(text)
    if kind == "json":
        values = json.loads(text)
        if not isinstance(values, dict) or key not in values:
            raise Unusable(f"there is no key {key!r}")
        return values[key]
    return part


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


def _pil(part: bytes, pixels: Pixels) -> Any:
    """Width, height, length of the mode, mode, pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(part[:12], "<u4").tolist()
    if width * height > pixels.max_pixels:
        raise Unusable(f"it has {height} x {width} pixels; --max-pixels is {pixels.max_pixels}")
    mode = part[12 : 12 + length].decode()
    return pixels.convert(Image.frombytes(mode, (width, height), part[12 + length :]))
