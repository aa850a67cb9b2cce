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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats import pixels
from data_prep.formats.mds import (
    SCALARS,
    Column,
    Shard,
    columns_of,
    decode,
    samples,
    shards_of,
)
from data_prep.formats.pixels import Pixels
from data_prep.formats.samples import Encoded, Samples, Unusable, fields_of
from data_prep.formats.split_folders import COLUMN, split_folders
from data_prep.options import Options, add_arguments
from data_prep.piece import Problems
from data_prep.source import BadRecords, Block, Piece, Source
from data_prep.split import ByColumn
from hpctrain.data.field import Field
from hpctrain.errors import ConfigError, DataError

IMAGES = ("jpeg", "png", "pil")
TAKEN = ("bytes", "str", "int", "str_int", "str_float", "ndarray", "json", *IMAGES)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="COLUMN[:KEY]",
        help="take only this column; COLUMN:KEY takes a key of a json column (may be repeated)",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="FIELD",
        help="the first axis of this field's arrays varies in length (may be repeated)",
    )
    pixels.add_arguments(parser)
    add_arguments(parser, split="")


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.convert import convert

    given, args.split = args.split, args.split or "train=1"
    options = Options.of(args)
    source = mds(args.folder, options, Pixels.of(args), named=args.column, variable=args.variable)
    if not given and source.columns:
        options = replace(options, split=ByColumn(COLUMN))
    convert(source, args.out, options)


@dataclass(frozen=True)
class Mds(Source):
    """See `mds`."""

    layout: tuple[Column, ...] = ()
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # (column, key) by field
    pixels: Pixels = field(default_factory=Pixels)

    def read(self, what: Shard, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        block = Samples(self.fields, what.file.path, keyed=False, columned=bool(self.columns))
        rest = (self.layout, self.chosen, self.pixels, self.fields)
        found = (
            Encoded(f"sample {number}", partial(_values, content, *rest), column=what.folder)
            for number, content in enumerate(samples(what))
        )
        return block.blocks(found, reading)


def mds(
    folder: Path,
    options: Options,
    pixels: Pixels | None = None,
    *,
    named: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> Source:
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
        columns=(COLUMN,) if "" not in folders else (),
        layout=layout,
        chosen=chosen,
        pixels=pixels,
    )


def _chosen(
    folder: Path, layout: Sequence[Column], named: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Return each field's column, and its key if it is a json column.

    Raises:
        ConfigError: A column does not exist or cannot be stored.
    """
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


def _first(
    shards: Sequence[Shard],
    layout: Sequence[Column],
    chosen: Mapping[str, tuple[str, str]],
    pixels: Pixels,
    problems: Problems,
    variable: Sequence[str],
) -> dict[str, Field]:
    """Return the schema of the first sample that can be used."""
    kinds = {column.name: column.kind for column in layout}
    images = {name for name, (column, _) in chosen.items() if kinds[column] in IMAGES}
    for shard in shards:
        for number, content in enumerate(samples(shard)):
            try:
                values = _values(content, layout, chosen, pixels, {})
                fields = fields_of(values, variable)
            except Unusable as error:
                problems.bad(shard.file.path, f"sample {number}", str(error))
                continue
            return fields | {name: pixels.field_of(values[name]) for name in images}
    raise DataError(f"{shards[0].file.path}: no sample can be used, as {problems.found[0]}")


def _values(
    sample: bytes,
    layout: Sequence[Column],
    chosen: Mapping[str, tuple[str, str]],
    pixels: Pixels,
    fields: Mapping[str, Field],
) -> dict[str, Any]:
    """Decode the chosen values of a sample.

    Raises:
        Unusable: The sample is damaged.
    """
    columns = {column.name: column for column in layout}
    parts, values = columns_of(sample, layout), {}
    for name, (column, key) in chosen.items():
        kind, part = columns[column].kind, parts[column]
        try:
            if kind == "pil":
                values[name] = pixels.of_pil(part)
            elif kind in IMAGES:
                values[name] = pixels.sample(part, fields.get(name))
            elif kind == "json":
                values[name] = _key(part, key)
            else:
                values[name] = decode(columns[column], part)
        except Unusable as error:
            raise Unusable(f"column {column!r}: {error}") from None
    return values


def _key(part: bytes, key: str) -> Any:
    try:
        values = json.loads(part)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not JSON: {error}") from None
    if not isinstance(values, dict) or key not in values:
        raise Unusable(f"there is no key {key!r}")
    return values[key]
