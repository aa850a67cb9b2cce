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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats import pixels
from data_prep.formats.litdata import (
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
from data_prep.formats.pixels import Pixels
from data_prep.formats.samples import Encoded, Samples, Unusable, fields_of
from data_prep.formats.split_folders import COLUMN, INDEX, split_folders
from data_prep.options import Options, add_arguments
from data_prep.piece import Problems
from data_prep.source import BadRecords, Block, Piece, Source
from data_prep.split import ByColumn
from hpctrain.data.field import Field, check_name
from hpctrain.errors import ConfigError, DataError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME",
        help="take only this value of each sample (may be repeated)",
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
    source = litdata(
        args.folder, options, Pixels.of(args), named=args.column, variable=args.variable
    )
    if not given and source.columns:
        options = replace(options, split=ByColumn(COLUMN))
    convert(source, args.out, options)


@dataclass(frozen=True)
class Litdata(Source):
    """See `litdata`."""

    layout: Layout = field(default_factory=Layout)
    chosen: Mapping[str, Column] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=Pixels)

    def read(self, what: Chunk, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        block = Samples(self.fields, what.file.path, keyed=False, columned=bool(self.columns))
        decode = decoder(what.file.path, self.layout)
        rest = (self.chosen, self.pixels, self.fields)
        found = (
            Encoded(
                f"sample {number}", partial(_values, decode, content, *rest), column=what.folder
            )
            for number, content in enumerate(samples(what, self.layout))
        )
        return block.blocks(found, reading)


def litdata(
    folder: Path,
    options: Options,
    pixels: Pixels | None = None,
    *,
    named: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> Source:
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
    decode, problems = decoder(chunks[0].file.path, layout), Problems(options.on_error)
    fields = _first(chunks, layout, decode, chosen, pixels, problems, variable)
    if unknown := sorted(set(variable) - set(fields)):
        raise ConfigError(f"--variable {unknown[0]}: the fields are {', '.join(fields)}")
    return Litdata(
        name="litdata",
        fields=fields,
        pieces=[Piece(c, (c.file,), samples=c.samples, bytes=c.bytes) for c in chunks],
        identity={
            "layout": asdict(layout),
            "columns": {name: column.path for name, column in chosen.items()},
            "pixels": pixels.identity(),
            "folders": [chunk.folder for chunk in chunks],
        },
        about={
            "from": str(folder.absolute()),
            "columns": {name: column.kind for name, column in chosen.items()},
        },
        columns=(COLUMN,) if "" not in folders else (),
        layout=layout,
        chosen=chosen,
        pixels=pixels,
    )


def _chosen(index: Path, columns: Mapping[str, Column], named: Sequence[str]) -> dict[str, Column]:
    """Return the columns to take, by field.

    Raises:
        ConfigError: A column does not exist, is given twice or cannot be stored.
    """
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


def _first(
    chunks: Sequence[Chunk],
    layout: Layout,
    decode: Callable[[Any], Any],
    chosen: Mapping[str, Column],
    pixels: Pixels,
    problems: Problems,
    variable: Sequence[str],
) -> dict[str, Field]:
    """Return the schema of the first sample that can be used."""
    for chunk in chunks:
        for number, content in enumerate(samples(chunk, layout)):
            try:
                values = _values(decode, content, chosen, pixels, {})
                fields = fields_of(values, variable)
            except Unusable as error:
                problems.bad(chunk.file.path, f"sample {number}", str(error))
                continue
            images = (name for name in chosen if IMAGE.fullmatch(chosen[name].kind))
            return fields | {name: pixels.field_of(values[name]) for name in images}
    raise DataError(f"{chunks[0].file.path}: no sample can be used, as {problems.found[0]}")


def _values(
    decode: Callable[[Any], Any],
    content: Any,
    chosen: Mapping[str, Column],
    pixels: Pixels,
    fields: Mapping[str, Field],
) -> dict[str, Any]:
    """Decode a sample and return the chosen values.

    Raises:
        Unusable: A value is missing, or an image is damaged.
    """
    sample, values = decode(content), {}
    for name, column in chosen.items():
        try:
            value = column.of(sample)
            if column.kind == "pil":
                value = pixels.of_pil(bytes(value))
            elif IMAGE.fullmatch(column.kind):
                value = pixels.sample(bytes(value), fields.get(name))
            values[name] = value
        except Unusable as error:
            raise Unusable(f"value {name!r}: {error}") from None
    return values
