"""The chunks of litdata. This module finds the samples, and the library decodes them.

index.json lists the chunks, the tree of a sample (dicts and lists) and the format of each leaf:

    count           uint32
    begins          uint32 (count + 1,): byte offset of each sample, and of the end of the last
    samples         each: uint32 sizes of the leaves, then the leaves
    rows            only for samples of text and nested lists: an Arrow table instead of `samples`

zstd compresses whole chunks, samples, or frames of samples. The library's own data set (0.2.76) is
not used: it replaces compressed chunks in the folder by decompressed ones, and it loads pickles,
which run code. Here pickles are never read, and no module that the index names is imported.
"""

import json
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.samples import Unusable
from data_prep.formats.shards.split_folders import INDEX, unpacked_zstd
from data_prep.source import SourceFile
from hpctrain.disk import parse_json
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.types import Array

IMAGE = re.compile(r"jpeg|pil|image(:\w+)?")
DECODED = re.compile(
    r"str|text|bool|int|float|bytes|numpy|tensor|json|no_header_(numpy|tensor):\d+"
)
NUMBERS = ("bool", "int", "float")
ZSTD, ROWS, FRAMES = b"\x28\xb5\x2f\xfd", b"LDARW01\0", b"LDFZ01\0\0"  # how files begin or end
_TREES = ("builtins.dict", "collections.OrderedDict", "builtins.list", "builtins.tuple")


@dataclass(frozen=True)
class Column:
    """A value of each sample: its keys and numbers in the tree, and its format in the index."""

    path: tuple[str | int, ...]
    kind: str

    def of(self, sample: Any) -> Any:
        """Return the value of this column."""
        try:
            for key in self.path:
                sample = sample[key]
        except (LookupError, TypeError):
            raise Unusable("it is missing") from None
        return sample


@dataclass(frozen=True)
class Layout:
    """How samples are stored: the tree (JSON), the formats of its leaves, and what zstd wraps."""

    tree: str = ""
    formats: tuple[str, ...] = ()
    compression: str = ""  # "", "chunk", "batch" or "sample"


@dataclass(frozen=True)
class Chunk:
    """A file with its number of samples, its size without compression, and its folder's name."""

    file: SourceFile
    samples: int
    bytes: int
    folder: str


def library(module: str, name: str) -> Any:
    """Import something from litdata."""
    try:
        return getattr(import_module(f"litdata.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this needs the library litdata, which cannot be used here ({error}): "
            "pip install 'hpctrain[litdata]'"
        ) from None


def opened(folder: Path, name: str) -> tuple[Layout, list[Chunk]]:
    """Read the index of a folder; `name` is the split that the folder is, or ""."""
    path = folder / INDEX
    try:
        content = parse_json(path.read_bytes())
        config, chunks = content["config"], []
        if config.get("encryption"):
            raise ConfigError(f"{path}: the chunks are encrypted; only plain chunks are read")
        loader = config.get("item_loader") or "PyTreeLoader"
        if any(entry.get("dim") for entry in content["chunks"]):
            loader = "TokensLoader"
        if loader != "PyTreeLoader":
            raise ConfigError(
                f"{path}: the chunks are for litdata's {loader}; those for PyTreeLoader are read"
            )
        compression = str(config["compression"] or "")
        if compression and compression.partition(":")[0] != "zstd":
            raise ConfigError(f"{path}: the chunks are compressed by {compression}; zstd is read")
        for entry in content["chunks"]:
            basename = str(entry["filename"])
            if Path(basename).name != basename:
                raise DataError(f"{path}: the chunk {basename!r} leads out of the folder")
            file = SourceFile.of(folder / basename)
            chunks.append(Chunk(file, int(entry["chunk_size"]), int(entry["chunk_bytes"]), name))
        level = str(config.get("compression_level") or "chunk") if compression else ""
        return Layout(
            str(config["data_spec"]), tuple(map(str, config["data_format"])), level
        ), chunks
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{path} is no index of litdata: {what}") from None


def columns_of(path: Path, layout: Layout) -> dict[str, Column]:
    """Return the columns by name: "a", "a.b" for a dict in a dict, "0" for a part of a tuple."""
    try:
        _, tree = json.loads(layout.tree)
        found = list(_columns((), tree, formats := list(layout.formats)))
    except (ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        raise DataError(f"{path} is no index of litdata: its data_spec: {error}") from None
    if formats:
        raise DataError(f"{path} is no index of litdata: data_spec has too few leaves")
    columns = {".".join(map(str, c.path)) or "sample": c for c in found}
    if len(columns) < len(found):
        raise ConfigError(f"{path}: two values of a sample would be the same field")
    return columns


def _columns(path: tuple[str | int, ...], node: Any, formats: list[str]) -> Iterator[Column]:
    """Yield the columns under a node of the tree, and remove their formats."""
    children = node["children_spec"]
    if node["type"] is None:
        yield Column(path, formats.pop(0))
        return
    if node["type"] not in _TREES:
        raise ValueError(f"type {node['type']!r}; a sample has {', '.join(_TREES)}")
    keys: Sequence[str | int] = range(len(children))
    if node["type"] in _TREES[:2]:
        keys = list(map(str, json.loads(node["context"])))
    elif (
        path
        and children
        and all(child["type"] is None for child in children)
        and set(formats[: len(children)]) <= set(NUMBERS)
    ):  # a list of numbers is one value; other lists have a column for each element
        yield Column(path, formats[0])
        del formats[: len(children)]
        return
    for key, child in zip(keys, children, strict=True):
        yield from _columns((*path, key), child, formats)


def decoder(path: str, layout: Layout) -> Callable[[Any], Any]:
    """Return a function that decodes what `samples` yields into a tree of values.

    Images, and values that litdata would decode by a pickle, stay bytes. The function raises
    Unusable if a sample is damaged.
    """
    leaves = len(layout.formats)
    formats = [kind if DECODED.fullmatch(kind) else "bytes" for kind in layout.formats]
    read_tree = library("streaming.config", "treespec_loads")
    loader = library("streaming.item_loader", "PyTreeLoader")()
    serializers = library("streaming.serializers", "_get_serializers")(None)
    try:
        config = {"data_format": formats, "data_spec": read_tree(layout.tree)}
        loader.setup(config, [], serializers)
    except (LookupError, ValueError, TypeError, NotImplementedError) as error:
        version = library("__about__", "__version__")
        raise ConfigError(
            f"{path}: litdata {version} does not know a format in {INDEX}: {error}; formats: "
            f"{', '.join(sorted(set(formats)))}"
        ) from None

    def decoded(sample: Any) -> Any:
        if isinstance(sample, dict):  # a row of an Arrow table
            return sample
        sizes = np.frombuffer(sample, "<u4", count=min(leaves, len(sample) // 4))
        if len(sizes) < leaves or 4 * leaves + sizes.sum(dtype=int) != len(sample):
            raise Unusable("it is damaged: the sizes of its values do not match its own")
        try:
            # torch warns if it makes a tensor of bytes that cannot be written.
            return loader.load_item_from_bytes(bytearray(sample), 0)
        except Exception as error:  # anything that the decoders of the library raise
            raise Unusable(f"it is damaged: {type(error).__name__}: {error}") from None

    return decoded


def samples(chunk: Chunk, layout: Layout) -> Iterator[Any]:
    """Yield the encoded samples of a chunk, or its rows if it has an Arrow table."""
    path, found = chunk.file.path, 0
    try:
        with open(path, "rb") as file:
            content = memoryview(b"")
            if chunk.file.size:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if content[:4] == ZSTD:
            content = memoryview(_Zstd.decompress(content, chunk.bytes))
        for sample in _samples(content, chunk, layout):
            yield sample
            found += 1
        if found != chunk.samples:
            raise ValueError(f"it has {found} samples, {INDEX} lists {chunk.samples}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except MemoryError as error:
        raise DataError(f"{path} is damaged, or there is too little memory: {error}") from None
    except (ValueError, RuntimeError, LookupError) as error:
        raise DataError(f"{path} is damaged: {error}") from None


def _samples(content: memoryview, chunk: Chunk, layout: Layout) -> Iterator[Any]:
    if content[-8:] == ROWS:
        found = library("streaming.item_loader", "open_arrow_footer_reader")(content)
        if found is None:
            raise ValueError("its Arrow table cannot be read")
        reader, is_file = found
        numbers = range(reader.num_record_batches) if is_file else ()
        for batch in map(reader.get_batch, numbers) if is_file else reader:
            batch.validate(full=True)  # damaged byte offsets would end this process
            yield from batch.to_pylist()
    elif content[:8] == FRAMES:
        header = library("streaming.framed_zstd", "parse_framed_header")(content)
        inflate = library("streaming.framed_zstd", "inflate_frame")
        for number, frame in enumerate(header.frames):
            ends = np.array(header.offsets[frame.first_item :][: frame.n_items + 1])
            yield from _cut(memoryview(inflate(content, header, number, _Zstd)), ends - ends[0])
    else:
        head = 4 * (chunk.samples + 2)
        ends = np.frombuffer(content, "<u4", count=min(head, len(content)) // 4).astype(int)
        if len(ends) != chunk.samples + 2 or ends[0] != chunk.samples or ends[1] != head:
            raise ValueError(
                f"{INDEX} lists {chunk.samples} samples, {chunk.bytes} bytes; it has "
                f"{len(content)} bytes, and its header says {ends[0] if len(ends) else 'nothing'}"
            )
        for sample in _cut(content, ends[1:]):
            yield _Zstd.decompress(sample) if layout.compression == "sample" else sample


def _cut(content: memoryview, ends: Array) -> Iterator[memoryview]:
    if ends[-1] != len(content) or (np.diff(ends) < 0).any():
        raise ValueError("the byte offsets of its samples do not match its size")
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        yield content[start:stop]


class _Zstd:
    """The decompression, as litdata's `inflate_frame` wants it."""

    @staticmethod
    def decompress(data: memoryview, decompressed_size: int = 2**32) -> bytes:
        """Return the content, or the first byte too much of it; see `unpacked_zstd`."""
        return unpacked_zstd(data, decompressed_size + 1)
