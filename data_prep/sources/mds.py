"""A folder of mosaicml-streaming (MDS): each column is a field. The library is not needed.

FOLDER/index.json, *.mds         shards, raw or compressed (gz, bz2, zstd)
FOLDER/train/index.json, …       each folder is a split, unless --split says something else

Numbers keep their dtype; int and str_int become int64, str_float becomes float64. str (UTF-8) and
bytes become variable-length uint8. ndarray columns become arrays; jpeg, png and pil become images.
--column COLUMN:KEY makes a key of a json column a field. pkl columns are never read, because
pickles can run code. The digests that index.json has are compared with the shards.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable
from data_prep.formats.shards.mds import (
    SCALARS,
    Column,
    Shard,
    columns_of,
    decode,
    samples,
    shards_of,
)
from data_prep.formats.shards.split_folders import COLUMN, split_folders
from data_prep.options import Options
from data_prep.source import Piece
from data_prep.sources import shard_folders
from data_prep.sources.shard_folders import ShardFolder
from hpctrain.errors import ConfigError, DataError

IMAGES = ("jpeg", "png", "pil")
TAKEN = ("bytes", "str", "int", "str_int", "str_float", "ndarray", "json", *IMAGES)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    what = "take only this column; COLUMN:KEY takes a key of a json column"
    shard_folders.arguments(parser, "COLUMN[:KEY]", what)


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    shard_folders.run(args, mds)


@dataclass(frozen=True)
class _Mds(ShardFolder):
    """See `mds`."""

    layout: tuple[Column, ...] = ()
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # (column, key) by field

    def samples(self, what: Shard) -> Iterator[bytes]:
        """See `ShardFolder`."""
        return samples(what)

    def decoder(self, what: Shard) -> Callable[[bytes], Mapping[str, Any]]:
        """See `ShardFolder`."""
        return self._values

    def _values(self, sample: bytes) -> dict[str, Any]:
        """Decode the chosen values of a sample."""
        columns = {column.name: column for column in self.layout}
        parts, values = columns_of(sample, self.layout), {}
        for name, (column, key) in self.chosen.items():
            kind, part = columns[column].kind, parts[column]
            try:
                if kind == "pil":
                    values[name] = self.pixels.of_pil(part)
                elif kind in IMAGES:
                    values[name] = self.pixels.sample(part, self.fields.get(name))
                elif kind == "json":
                    values[name] = _key(part, key)
                else:
                    values[name] = decode(columns[column], part)
            except Unusable as error:
                raise Unusable(f"column {column!r}: {error}") from None
        return values


def mds(
    folder: Path,
    options: Options,
    pixels: Pixels | None = None,
    *,
    named: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> ShardFolder:
    """Make a source of MDS shards; each shard is a piece.

    Args:
        folder: A folder with an index.json, or with folders that have one each.
        options: The options of the conversion; `on_error` is used.
        pixels: How images become samples.
        named: "COLUMN" or "COLUMN:KEY"; empty takes all columns.
        variable: Fields whose first axis varies in length.

    Raises:
        ConfigError: A column does not exist or cannot be stored.
        DataError: The index or a shard is missing or damaged.
    """
    pixels = pixels or Pixels()
    folders = split_folders(folder, "mosaicml-streaming")
    layout: tuple[Column, ...] = ()
    shards: list[Shard] = []
    for name, path in folders.items():
        for shard, columns in shards_of(path, name):
            if layout and columns != layout:
                raise DataError(f"{shard.file.path} has other columns than {shards[0].file.path}")
            layout = columns
            shards.append(shard)
    shards = [shard for shard in shards if shard.samples]
    if not shards:
        raise DataError(f"{folder} has no samples")
    chosen = _chosen(folder, layout, named)
    kinds = {column.name: column.kind for column in layout}
    source = _Mds(
        name="mds",
        fields={},
        pieces=[Piece(s, (s.file,), samples=s.samples, bytes=s.bytes) for s in shards],
        identity={
            "layout": [asdict(column) for column in layout],
            "wanted": chosen,
            "pixels": asdict(pixels),
            "folders": [shard.folder for shard in shards],
        },
        about={"from": str(folder.absolute()), "columns": {c.name: c.encoding for c in layout}},
        columns=(COLUMN,) if "" not in folders else (),
        pixels=pixels,
        images=frozenset(name for name, (column, _) in chosen.items() if kinds[column] in IMAGES),
        layout=layout,
        chosen=chosen,
    )
    return source.with_fields(options, variable)


def _chosen(
    folder: Path, layout: Sequence[Column], named: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Return each field's column, and its key if it is a json column."""
    kinds = {column.name: column.kind for column in layout}
    chosen: dict[str, tuple[str, str]] = {}
    for text in named or list(kinds):
        column, _, key = (text, "", "") if text in kinds else text.partition(":")
        if column not in kinds:
            raise ConfigError(f"--column {text}: there are {', '.join(kinds)}")
        kind, name = kinds[column], key or column
        others = "; --column takes only others"
        if kind == "pkl":
            raise ConfigError(f"{folder}: column {column!r} holds pickles, which run code{others}")
        if (kind == "json") != bool(key):
            raise ConfigError(
                f"{folder}: column {column!r} holds JSON: --column {column}:KEY takes a key{others}"
                if kind == "json"
                else f"--column {text}: the column is {kind}, which has no keys"
            )
        if kind == "uint64" or kind not in SCALARS | set(TAKEN):
            raise ConfigError(
                f"{folder}: column {column!r} is {kind}, which no field can hold{others}"
            )
        if name in chosen:
            raise ConfigError(f"--column: the field {name!r} is there twice")
        chosen[name] = column, key
    return chosen


def _key(part: bytes, key: str) -> Any:
    try:
        values = json.loads(part)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not JSON: {error}") from None
    if not isinstance(values, dict) or key not in values:
        raise Unusable(f"there is no key {key!r}")
    return values[key]
