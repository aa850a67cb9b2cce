"""What every command that writes a data set takes.

The size of a shard, 256 MiB unless asked otherwise, lies between two costs. Small shards are
many: each is an open, a few requests to the metadata server, and a line in the index, times every
rank that reads it; 10 TB are 40,000 of these, at 64 MiB 160,000, where directories and servers
begin to suffer. Large shards are few: ranks that divide the shards among themselves want several
each (64 ranks and 4 shards leave 60 waiting), a piece is what one process converts, holds in
memory and does again after a crash, and a shard is the unit of staging, of verification and of
the loader's block shuffle. 256 MiB is also many stripes of a parallel file system (1 to 4 MiB on
Lustre, 4 to 16 MiB blocks on GPFS), so that reading one shard already asks several servers.
Opening a shard of four datasets takes 1 ms on a local disk (measured), 0.4 % of what reading it at
1 GB/s takes; where an open costs 20 ms, as on a busy shared file system, it is 7 %, and of a shard
of 64 MiB 30 %.
"""

import argparse
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from data_prep.split import Fractions, Split, parse_split
from hpctrain.data.compression import CHUNK_BYTES, LEVELS, Compression
from hpctrain.errors import ConfigError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHARD_SIZE = "256MiB"
ON_ERROR = ("stop", "skip", "collect")


@dataclass(frozen=True)
class Options:
    """How to write, whatever is written.

    Attributes:
        shard_bytes: Data in one shard, at most, before it is compressed.
        compression: Of the shards.
        auto: The codec is to be chosen (see `data_prep.codec`); `compression` has the chunks.
        split: Which split each sample belongs to.
        stratify: The field whose classes are split each in the same proportions, or "".
        dedup: "exact" leaves out samples whose content was there before.
        on_error: What becomes of records that cannot be used.
        nan: "refuse": a sample with a value that is not finite cannot be used.
        workers: Processes.
        part: (i, n): only the i-th of n parts, from 1; `finalize` follows.
        overwrite: Another data set in OUT, or what is left of another command, may be replaced.
        quiet: Print errors only.
        command: For the provenance.
    """

    shard_bytes: int
    compression: Compression = field(default_factory=Compression)
    auto: bool = False
    split: Split = field(default_factory=lambda: Fractions({"train": 1.0}))
    stratify: str = ""
    dedup: str = "none"
    on_error: str = "stop"
    nan: str = "allow"
    workers: int = 1
    part: tuple[int, int] | None = None
    overwrite: bool = False
    quiet: bool = False
    command: str = ""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Take them from the command line.

        Raises:
            ConfigError: A value that is not allowed.
        """
        part = _part(args.part)
        if part and (args.dedup != "none" or args.stratify):
            option = "--dedup" if args.dedup != "none" else "--stratify"
            raise ConfigError(
                f"{option} has to see all samples, --part only some: leave it out here, and "
                f"after `finalize` run `python -m data_prep repack OUT NEW {option} …`"
            )
        return cls(
            shard_bytes=parse_size(args.shard_size),
            compression=_compression(args),
            auto=args.codec == "auto",
            split=parse_split(args.split),
            stratify=args.stratify,
            dedup=args.dedup,
            on_error=args.on_error,
            nan=args.nan,
            workers=args.workers or len(os.sched_getaffinity(0)),
            part=part,
            overwrite=args.overwrite,
            quiet=args.quiet,
            command=args.command_line,
        )

    @property
    def of_result(self) -> dict[str, Any]:
        """What the bytes of the result depend on; JSON.

        Not `on_error`: it only decides whether there is a result.
        """
        return {
            "shard_bytes": self.shard_bytes,
            **self._of_compression,
            "split": str(self.split),
            "stratify": self.stratify,
            "dedup": self.dedup,
            "nan": self.nan,
        }

    @property
    def two_passes(self) -> bool:
        """Whether all samples have to be seen before the first is written."""
        return self.dedup != "none" or bool(self.stratify)

    @property
    def _of_compression(self) -> dict[str, Any]:
        compression = self.compression
        if self.auto:  # what is chosen must not change what the job is
            return {"codec": "auto", "chunk_bytes": compression.chunk_bytes}
        if compression.codec == "none":
            return {"codec": "none"}
        return asdict(compression)


def add_arguments(parser: argparse.ArgumentParser, split: str = "train=1") -> None:
    """Add the common options, with the converter's own default for the split."""
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    group = parser.add_argument_group("writing")
    group.add_argument(
        "--shard-size",
        default=SHARD_SIZE,
        metavar="SIZE",
        help="data in one shard, before it is compressed, such as 64MB or 1GiB (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--codec",
        choices=(*LEVELS, "auto"),
        default="none",
        help="how shards are compressed: none can be mapped, gzip is read everywhere, lz4 is the "
        "fastest, zstd and blosc2 are small and fast; auto tries them on a few samples (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--level",
        type=int,
        metavar="N",
        help="of the codec: gzip 1-9, zstd 1-22, blosc2 0-9; more is smaller and slower (default: "
        + ", ".join(f"{name} {levels[1]}" for name, levels in LEVELS.items() if levels)
        + ")",
    )
    group.add_argument(
        "--chunk",
        metavar="SIZE",
        help="samples that are compressed, read and decoded together, at least one (default: about "
        f"{CHUNK_BYTES // 2**20}MiB of them)",
    )
    group.add_argument(
        "--split",
        default=split,
        metavar="SPLIT",
        help="train=0.9,val=0.1: by a hash of the sample, so that it stays where it is when data "
        "is added; column:NAME; file:train=PATTERN,val=PATTERN (default: %(default)s)",
    )
    group.add_argument(
        "--stratify",
        default="",
        metavar="FIELD",
        help="split each class of this field in the same proportions (reads the source twice)",
    )
    group.add_argument(
        "--dedup",
        choices=("none", "exact"),
        default="none",
        help="exact: leave out samples whose content was there before (reads the source twice)",
    )
    group.add_argument(
        "--on-error",
        choices=ON_ERROR,
        default="stop",
        help="a record that cannot be used: stop at the first; skip it; collect: read "
        "everything, report them all, and write nothing (default: %(default)s)",
    )
    group.add_argument(
        "--nan",
        choices=("allow", "refuse"),
        default="allow",
        help="refuse: a sample with a value that is not finite cannot be used",
    )
    group.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes (default: the cores); the result does not depend on it",
    )
    group.add_argument(
        "--part",
        metavar="I/N",
        help="write the I-th of N parts, from 1, as one task of a job array; the last one puts all "
        "together, as does python -m data_prep finalize OUT",
    )
    group.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    group.add_argument("--quiet", action="store_true", help="print errors only")


def parse_size(text: str, option: str = "--shard-size") -> int:
    """Return the bytes of a size such as "64MB" or "1.5GiB".

    Raises:
        ConfigError: It is not a size with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    size = float(match[1]) * UNITS.get(match[2], 0) if match else 0
    if not 1 <= size < 2**63:
        raise ConfigError(
            f"{option} {text!r}: give the bytes with a unit, such as 64MB ({', '.join(UNITS)})"
        )
    return int(size)


def _compression(args: argparse.Namespace) -> Compression:
    size = CHUNK_BYTES if args.chunk is None else parse_size(args.chunk, "--chunk")
    if args.codec == "auto":
        if args.level is not None:
            raise ConfigError("--level is one codec's, --codec auto chooses one: leave one out")
        return Compression(chunk_bytes=size)
    if args.codec == "none" and args.chunk is not None:
        raise ConfigError("--chunk is for compressed shards: give a --codec, or leave it out")
    return Compression(args.codec, args.level, size)


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--part {text!r}: it is I/N, such as 1/8 to 8/8")
    return int(match[1]), int(match[2])


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
