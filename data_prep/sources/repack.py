"""Write a data set again: other shards, codec, splits or order.

    python -m data_prep repack SRC OUT --shard-size 1GiB --codec zstd
    python -m data_prep repack SRC OUT --shuffle 0
    python -m data_prep repack SRC OUT --split train=0.9,val=0.1 --stratify label

SRC is a folder with an index.json, written by this package or by `index`. The sizes of its shards
and their digests are compared with the index.

Without options, splits and order stay as they are. --shuffle puts the samples of each split in a
random order (or all samples, if --split makes other splits). The same SEED gives the same order.
Any number of samples can be shuffled. A data set that was split by --group keeps its groups whole
with another --split, too; --group '' divides them.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.dataset import blocks, reader_of
from data_prep.formats.files import ranges
from data_prep.options import Options, writing
from data_prep.source import BadRecords, InputSource, Piece, SampleBlock, SourceFile
from hpctrain.base.errors import ConfigError
from hpctrain.data.places.origin import check_digest
from hpctrain.data.samplers.order import Order
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.types import Int64s
from hpctrain.data.sources.reader import Reader

_KEEP = "keep"
_SHUFFLED_BYTES = 256 * 2**20  # a block in random order; larger blocks jump less between shards
FULL = 15 / 16  # part of a shard that a piece fills, if only the average length is known

ARGUMENTS = f"""
src=SRC : path
    folder of a data set
--shuffle SEED : int
    put the samples in a random order
{writing(_KEEP)}
"""


def prepare(args: argparse.Namespace) -> None:
    """Without --split the splits stay; with it, groups stay whole unless `--group ''` is given."""
    args.keep = args.split == _KEEP
    if args.keep:
        args.split = "column:split"
    elif args.group is None:
        args.group = Index.load(args.src).group


class _Part(NamedTuple):
    """Samples `start` to `stop` of a group of shards; `owned` are the shards that it verifies."""

    group: int
    start: int
    stop: int
    owned: tuple[int, ...]


@dataclass(frozen=True)
class _Repack(InputSource):
    folder: str = ""  # folder of the data set
    # The fields of the source, with their places in its files.
    stored: tuple[tuple[str, Field], ...] = ()
    groups: Sequence[Sequence[Shard]] = ()  # the shards of each group
    # The files of the shards, as they were when the work was planned.
    files: Sequence[Sequence[SourceFile]] = ()
    seed: int | None = None  # seed of the random order; None keeps the order of the source
    bytes_each: int = 1  # approximate bytes of a sample

    def read(self, what: _Part, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        shards, files = self.groups[what.group], self.files[what.group]
        for number in what.owned:
            check_digest(Path(self.folder, shards[number].path), shards[number])
        if what.group not in self._readers:
            self._readers[what.group] = reader_of(self.folder, dict(self.stored), shards)
        reader = self._readers[what.group]
        touched: set[int] = set()
        for samples, values in self._values(what, reader):
            numbers, rows = reader.locate(samples)
            touched |= set(numbers.tolist())
            yield self._block([shards[number] for number in numbers.tolist()], rows, values)
        for number in touched:  # check that the shards were not written to since they were planned
            files[number].check()

    @cached_property
    def _readers(self) -> dict[int, Reader]:
        """Those of this process, by group."""
        return {}

    def _values(self, what: _Part, reader: Reader) -> Iterator[tuple[Int64s, Any]]:
        """Yield the samples of a part and their values; in order, each time those of one shard."""
        if self.seed is not None:
            order, step = Order(len(reader), self.seed), max(1, _SHUFFLED_BYTES // self.bytes_each)
            for start in range(what.start, what.stop, step):
                samples = order(what.group, np.arange(start, min(start + step, what.stop)))
                yield samples, reader.read(samples)
            return
        end = 0
        for shard in reader.shards:
            begin, end = end, end + shard.count
            for start, values in blocks(reader, max(begin, what.start), min(end, what.stop)):
                yield np.arange(start, start + len(next(iter(values.values())))), values

    def _block(self, shards: Sequence[Shard], rows: Int64s, values: Any) -> SampleBlock:
        return SampleBlock(
            values,
            column=[shard.split for shard in shards],
            file=f"{self.folder}/{shards[0].path}",
            records=lambda i: f"{shards[i].path} sample {rows[i]}",
        )


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the samples of a data set."""
    src, seed, keep = args.src, args.shuffle, args.keep
    index = Index.load(src)
    index.check(src)
    stored = dict(index.fields)
    if seed is not None and str(options.split).startswith("file:"):
        raise ConfigError(f"--split {options.split} goes by the shards, which --shuffle mixes")
    kept = [index.split(name).shards for name in index.splits]
    groups = kept if keep else [index.shards]
    files = [[SourceFile.of(src / shard.path) for shard in group] for group in groups]
    bytes_each = _bytes_each(src, index.shards, stored)
    size = options.shard_bytes
    if any(field.variable for field in stored.values()):
        size = int(size * FULL)
    pieces = []
    for number, group in enumerate(groups):
        for part in _parts(number, group, max(1, size // bytes_each), seed):
            owned = [files[number][i] for i in part.owned]
            pieces.append(Piece(part, owned, (part.stop - part.start) * bytes_each))
    return _Repack(
        name="repack",
        # Without the places of the source's datasets: the output has its own.
        fields={n: Field(f.dtype, f.shape, f.variable) for n, f in stored.items()},
        pieces=pieces,
        identity={"digest": index.digest, "seed": seed, "keep": keep, "fields": list(stored)},
        about={
            "from": {
                "folder": str(src.resolve()),
                "digest": index.digest,
                "provenance": dict(index.provenance),
            }
        },
        categories=dict(index.categories),
        columns=("split",),
        folders=(str(src),),
        group=index.group if keep else "",
        folder=str(src),
        stored=tuple(stored.items()),
        groups=groups,
        files=files,
        seed=seed,
        bytes_each=bytes_each,
    )


def _parts(group: int, shards: Sequence[Shard], size: int, seed: int | None) -> list[_Part]:
    """Cut a group into parts of `size` samples; each shard is owned by one part."""
    counts = np.array([shard.count for shard in shards])
    ends = list(ranges(int(counts.sum()), size))
    # Without shuffling, the part that reads the first sample of a shard owns it: verifying it puts
    # the shard into the page cache.
    begins = np.cumsum(counts) - counts
    owners = begins // size if seed is None else np.arange(len(shards)) % len(ends)
    order = np.argsort(owners, kind="stable")
    owned = np.split(order, np.searchsorted(owners[order], np.arange(1, len(ends))))
    return [
        _Part(group, *pair, tuple(mine.tolist())) for pair, mine in zip(ends, owned, strict=True)
    ]


def _bytes_each(src: Path, shards: Sequence[Shard], fields: dict[str, Field]) -> int:
    """Return the bytes of a sample: exact, or the average if fields are variable-length."""
    size = 0.0
    for name, field in fields.items():
        if not field.variable:
            size += field.nbytes
            continue
        known = [shard for shard in shards if name in shard.elements]
        elements = sum(shard.elements[name] for shard in known)
        if not known:  # the index does not have the numbers: take the average of the first shard
            known = [shards[0]]
            elements = int(reader_of(src, {name: field}, known).elements(name)[0])
        size += field.nbytes * elements / sum(shard.count for shard in known) + 8
    return math.ceil(size)
