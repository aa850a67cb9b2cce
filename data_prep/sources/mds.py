"""A folder of mosaicml-streaming (MDS): each column is a field. The library is not needed.

FOLDER/index.json, *.mds         shards, raw or compressed (gz, bz2, zstd)
FOLDER/train/index.json, …       each folder is a split, unless --split says something else

Numbers keep their dtype; int and str_int become int64, str_float becomes float64. str (UTF-8) and
bytes become variable-length uint8. ndarray columns become arrays; jpeg, png and pil become images.
--column COLUMN:KEY makes a key of a json column a field. pkl columns are never read, because
pickles can run code. The digests that index.json has are compared with the shards.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats.images import pixels
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.mds import (
    INDEX,
    SCALARS,
    Column,
    Shard,
    columns_of,
    decode,
    samples,
    shards_of,
)
from data_prep.formats.samples import Unusable, key_of
from data_prep.options import VARIABLE, Options, writing
from data_prep.source import BadRecords, Piece, Source
from data_prep.sources.stream import Encoded, Stream
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import check_name

IMAGES = ("jpeg", "png", "pil")
TAKEN = ("bytes", "str", "int", "str_int", "str_float", "ndarray", "json", *IMAGES)

ARGUMENTS = (
    f"""
folder=FOLDER : path
--column COLUMN[:KEY] ...
    take only this column; COLUMN:KEY takes a key of a json column
{VARIABLE}
""",
    pixels.add_arguments,
    writing(""),
)
EPILOG = pixels.__doc__


@dataclass(frozen=True)
class _Mds(Stream):
    layout: tuple[Column, ...] = ()
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # (column, key) by field

    def encoded(self, file: str, what: Shard, reading: BadRecords) -> Iterator[Encoded]:
        """See `Stream`."""
        for number, content in enumerate(samples(what)):
            yield Encoded(f"sample {number}", partial(self._values, content, what.folder))

    def _values(self, sample: bytes, folder: str) -> tuple[dict[str, Any], str]:
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
                else:
                    values[name] = key_of(part, key) if key else decode(columns[column], part)
            except Unusable as error:
                raise Unusable(f"column {column!r}: {error}") from None
        return values, folder


def source(args: argparse.Namespace, options: Options) -> Source:
    """Return the samples of MDS shards; each shard is a piece."""
    folder, pixels, shards = args.folder, Pixels.of(args), list[Shard]()
    layout: tuple[Column, ...] = ()
    for name, path in _folders(folder).items():
        for shard, columns in shards_of(path, name):
            if layout and columns != layout:
                raise DataError(f"{shard.file.path} has other columns than {shards[0].file.path}")
            layout = columns
            shards.append(shard)
    shards = [shard for shard in shards if shard.samples]
    if not shards:
        raise DataError(f"{folder} has no samples")
    chosen = _chosen(folder, layout, args.column)
    kinds = {column.name: column.kind for column in layout}
    found = _Mds(
        name="mds",
        fields={},
        pieces=[Piece((s.file.path, s), (s.file,), s.samples, s.bytes) for s in shards],
        identity={
            "layout": [asdict(column) for column in layout],
            "wanted": chosen,
            "pixels": asdict(pixels),
            "folders": [shard.folder for shard in shards],
        },
        about={"from": str(folder.absolute()), "columns": {c.name: c.encoding for c in layout}},
        own="folder",
        pixels=pixels,
        images=frozenset(name for name, (column, _) in chosen.items() if kinds[column] in IMAGES),
        layout=layout,
        chosen=chosen,
    )
    return found.with_fields(options, args.variable, f"{folder}: no sample can be used")


def _folders(folder: Path) -> dict[str, Path]:
    """Return the folders that have an index, by split; the split of `folder` itself is ""."""
    if (folder / INDEX).exists():
        return {"": folder}
    folders = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{INDEX}"))}
    if not folders:
        raise DataError(
            f"{folder} has no {INDEX}, and no folder in it has: mosaicml-streaming has not written "
            "it"
        )
    for name in folders:
        check_name(name, "split")
    return folders


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
        problem = ""
        if kind == "pkl":
            problem = "holds pickles, which run code"
        elif kind == "json" and not key:
            problem = f"holds JSON: --column {column}:KEY takes a key"
        elif key and kind != "json":
            raise ConfigError(f"--column {text}: the column is {kind}, which has no keys")
        elif kind == "uint64" or kind not in SCALARS | set(TAKEN):
            problem = f"is {kind}, which no field can hold"
        if problem:
            raise ConfigError(f"{folder}: column {column!r} {problem}; --column takes only others")
        if name in chosen:
            raise ConfigError(f"--column: the field {name!r} is there twice")
        chosen[name] = column, key
    return chosen
