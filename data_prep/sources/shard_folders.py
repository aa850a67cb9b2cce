"""What the commands for folders of other libraries' shards have in common: `mds` and `litdata`."""

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from data_prep.formats.images import pixels
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Encoded, Samples, Unusable, fields_of
from data_prep.formats.shards.split_folders import COLUMN
from data_prep.options import VARIABLE, Options, add_arguments, add_repeated
from data_prep.source import BadRecords, Block, Source
from data_prep.writing.piece import Problems
from data_prep.writing.split import ByColumn
from hpctrain.errors import DataError
from hpctrain.shards.field import Field


def arguments(parser: argparse.ArgumentParser, column: str, text: str) -> None:
    """Add the arguments of such a command; `column` and `text` are the help of --column."""
    parser.epilog = pixels.__doc__
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add_repeated(parser, "--column", column, text)
    add_repeated(parser, *VARIABLE)
    pixels.add_arguments(parser)
    add_arguments(parser, split="")


def run(args: argparse.Namespace, make: Callable[..., "ShardFolder"]) -> None:
    """Convert the source that `make(folder, options, pixels, named=…, variable=…)` returns."""
    from data_prep.writing.convert import convert

    given, args.split = args.split, args.split or "train=1"
    options = Options.of(args)
    source = make(args.folder, options, Pixels.of(args), named=args.column, variable=args.variable)
    if not given and source.columns:
        options = replace(options, split=ByColumn(COLUMN))
    convert(source, args.out, options)


@dataclass(frozen=True)
class ShardFolder(Source):
    """A source whose pieces are shards, with samples that are decoded one by one.

    What `Piece.what` holds has the attributes `file`, a `SourceFile`, and `folder`, the split.

    Attributes:
        pixels: How images become samples.
        images: The fields that are images.
    """

    pixels: Pixels = field(default_factory=Pixels)
    images: frozenset[str] = frozenset()

    @abstractmethod
    def samples(self, what: Any) -> Iterator[Any]:
        """Yield the encoded samples of a shard."""

    @abstractmethod
    def decoder(self, what: Any) -> Callable[[Any], Mapping[str, Any]]:
        """Return a function that decodes a sample of a shard; it raises `Unusable`."""

    def read(self, what: Any, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        block = Samples(self.fields, what.file.path, keyed=False, columned=bool(self.columns))
        decode = self.decoder(what)
        found = (
            Encoded(f"sample {number}", partial(decode, content), column=what.folder)
            for number, content in enumerate(self.samples(what))
        )
        return block.blocks(found, reading)

    def with_fields(self, options: Options, variable: Sequence[str]) -> Self:
        """Return the source with the schema of its first sample that can be used."""
        fields, problems = dict[str, Field](), Problems(options.on_error)
        for shard in (piece.what for piece in self.pieces):
            decode = self.decoder(shard)
            for number, content in enumerate(self.samples(shard)):
                try:
                    values = decode(content)
                    fields = fields_of(values, variable)
                except Unusable as error:
                    problems.bad(shard.file.path, f"sample {number}", str(error))
                    continue
                fields |= {name: self.pixels.field_of(values[name]) for name in self.images}
                return replace(self, fields=fields)
        path = self.pieces[0].what.file.path
        raise DataError(f"{path}: no sample can be used, as {problems.found[0]}")
