"""A folder of litdata (`optimize`): each value of a sample is a field. Needs the library litdata.

FOLDER/index.json, *.bin         chunks, raw or compressed by zstd
FOLDER/train/index.json, …       each folder is a split, unless --split says something else

A value s["a"]["b"] is the field `a.b`; the parts of a tuple are the fields `0`, `1`, …. int and
float become int64 and float64, bool becomes uint8. Arrays, tensors and lists of numbers become
arrays; str (UTF-8) and bytes become variable-length uint8; images become images. Values that
litdata has stored as pickles are never read, because pickles can run code. Encrypted chunks and
those for TokensLoader are not read. The samples keep their order.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable
from data_prep.formats.shards.litdata import (
    DECODED,
    IMAGE,
    Chunk,
    Column,
    Layout,
    columns_of,
    decoder,
    opened,
    samples,
)
from data_prep.formats.shards.split_folders import COLUMN, INDEX, split_folders
from data_prep.options import Options
from data_prep.source import Piece
from data_prep.sources import shard_folders
from data_prep.sources.shard_folders import ShardFolder
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import check_name


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    shard_folders.arguments(parser, "NAME", "take only this value of each sample")


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    shard_folders.run(args, litdata)


@dataclass(frozen=True)
class Litdata(ShardFolder):
    """See `litdata`."""

    layout: Layout = field(default_factory=Layout)
    chosen: Mapping[str, Column] = field(default_factory=dict)

    def samples(self, what: Chunk) -> Iterator[Any]:
        """See `ShardFolder`."""
        return samples(what, self.layout)

    def decoder(self, what: Chunk) -> Callable[[Any], Mapping[str, Any]]:
        """See `ShardFolder`."""
        return partial(self._values, decoder(what.file.path, self.layout))

    def _values(self, decode: Callable[[Any], Any], content: Any) -> dict[str, Any]:
        """Decode a sample and return the chosen values."""
        sample, values = decode(content), {}
        for name, column in self.chosen.items():
            try:
                value = column.of(sample)
                if column.kind == "pil":
                    value = self.pixels.of_pil(bytes(value))
                elif IMAGE.fullmatch(column.kind):
                    value = self.pixels.sample(bytes(value), self.fields.get(name))
                values[name] = value
            except Unusable as error:
                raise Unusable(f"value {name!r}: {error}") from None
        return values


def litdata(
    folder: Path,
    options: Options,
    pixels: Pixels | None = None,
    *,
    named: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> ShardFolder:
    """Make a source of litdata's chunks; each chunk is a piece.

    Args:
        folder: A folder with an index.json, or with folders that have one each.
        options: The options of the conversion; `on_error` is used.
        pixels: How images become samples.
        named: The columns to take; empty takes all.
        variable: Fields whose first axis varies in length.

    Raises:
        ConfigError: A column does not exist or cannot be stored, or the library is missing.
        DataError: The index or a chunk is missing or damaged.
    """
    pixels = pixels or Pixels()
    folders = split_folders(folder, "litdata")
    layout, chunks, above = Layout(), list[Chunk](), folder
    for name, path in folders.items():
        found, more = opened(path, name)
        if chunks and found != layout:
            raise DataError(f"{path / INDEX} has other columns than {above / INDEX}")
        layout, above = found, path
        chunks += [chunk for chunk in more if chunk.samples]
    if not chunks:
        raise DataError(f"{folder} has no samples")
    chosen = _chosen(above / INDEX, columns_of(above / INDEX, layout), named)
    source = Litdata(
        name="litdata",
        fields={},
        pieces=[Piece(c, (c.file,), samples=c.samples, bytes=c.bytes) for c in chunks],
        identity={
            "layout": asdict(layout),
            "columns": {name: column.path for name, column in chosen.items()},
            "pixels": asdict(pixels),
            "folders": [chunk.folder for chunk in chunks],
        },
        about={
            "from": str(folder.absolute()),
            "columns": {name: column.kind for name, column in chosen.items()},
        },
        columns=(COLUMN,) if "" not in folders else (),
        pixels=pixels,
        images=frozenset(name for name in chosen if IMAGE.fullmatch(chosen[name].kind)),
        layout=layout,
        chosen=chosen,
    )
    return source.with_fields(options, variable)


def _chosen(index: Path, columns: Mapping[str, Column], named: Sequence[str]) -> dict[str, Column]:
    """Return the columns to take, by field."""
    for name in named:
        if name not in columns:
            raise ConfigError(f"--column {name}: there are {', '.join(columns)}")
        if named.count(name) > 1:
            raise ConfigError(f"--column {name} is there twice")
    chosen = {name: columns[name] for name in named or columns}
    for name, column in chosen.items():
        where = f"{index}: the value {name!r} of the samples"
        if "pickle" in column.kind or column.kind.startswith("graph"):
            raise ConfigError(
                f"{where} is stored as {column.kind}: pickles can run code and are never read; "
                "--column takes only others"
            )
        if not DECODED.fullmatch(column.kind) and not IMAGE.fullmatch(column.kind):
            raise ConfigError(
                f"{where} is stored as {column.kind}, which no field can hold; --column takes "
                "only others"
            )
        check_name(name, "field")
    return chosen
