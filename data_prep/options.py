"""The options of every command that writes a data set.

The default shard size, 256 MiB, is a compromise. Small shards are many: each rank opens each shard
that it reads (1 ms on a local disk, 20 ms on a busy shared file system: 0.4 % or 7 % of the time to
read 256 MiB at 1 GB/s), and directories and servers become slow with many files. Large shards are
few: ranks that divide them need several each, and a shard is the unit that one process converts,
holds in memory and repeats after a crash, and the unit of staging and verification.
"""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data_prep.writing.compression import CODECS, Compression
from data_prep.writing.split import ByColumn, Fractions, Split, parse_split
from hpctrain.base.errors import ConfigError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
VARIABLE = """
--variable FIELD ...
    the first axis of this field's arrays varies in length
"""
DIR = """
folder=DIR : path
    folder of the data set
"""
_TYPE = r"( : (?P<type>\w+))?"
_OPTION = re.compile(
    r"(?P<flags>-\S+(, -\S+)*)( (?P<value>[^ =.]\S*))?(?P<many> \.\.\.)?( =(?P<default>.*?))?"
    + _TYPE
)
_POSITIONAL = re.compile(r"(?P<name>\w+)=(?P<value>\{.*\}|\w+)(?P<nargs>[+*]?)" + _TYPE)
_WRITING = f"""
out=OUT : path
    folder to write
[writing]
--shard-size SIZE = 256MiB
    the most data in one shard, before compression, such as 64MB or 1GiB
--codec {{{",".join(CODECS)}}} = none
    how shards are compressed: shards with none can be mapped into memory, every HDF5 reads gzip,
    lz4 is the fastest, zstd is small and fast
--split SPLIT =
    train=0.9,val=0.1 splits by a hash of the sample, so that a sample stays in its split when data
    is added; column:NAME takes the split from a column or field; file:train=PATTERN,val=PATTERN
    takes it from the file name
--stratify FIELD =
    split each class of this field in the same proportions (reads the source twice)
--group FIELD
    keep samples with the same value of this field or column, such as a patient, in one split, with
    the fractions met as well as possible (reads the source twice)
--on-error {{stop,skip}} = stop
    for records that cannot be used. stop: end at the first one; skip: leave them out, and list them
    in OUT/problems.jsonl
--nan {{allow,refuse}} = allow
    refuse: treat samples with values that are not finite as records that cannot be used
--workers N : positive
    number of worker processes (default: the number of cores); the result does not depend on it
--part I/N
    write the I-th of N parts, from 1, as one task of a job array; the part that ends last puts all
    parts together, and so does python -m data_prep finalize OUT
--overwrite
    replace what OUT holds
--quiet
    print errors only
"""


@dataclass(frozen=True)
class Options:
    """How to write a data set, whatever the source; see the options of the same names."""

    shard_bytes: int
    compression: Compression = field(default_factory=Compression)
    split: Split = field(default_factory=lambda: Fractions({"train": 1.0}))
    stratify: str = ""
    group: str = ""
    on_error: str = "stop"
    nan: str = "allow"
    workers: int = 1
    part: tuple[int, int] | None = None
    overwrite: bool = False
    quiet: bool = False
    command: str = ""  # the command line, for the provenance
    by_own: bool = False  # whether `Source.own` decides the splits, because --split is not given

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return the options that the arguments of the command line give."""
        for option in ("stratify", "group") if args.part else ():
            if vars(args)[option]:
                raise ConfigError(
                    f"--{option} has to see all samples, --part only some: leave it out here, and "
                    f"after `finalize` run `python -m data_prep repack OUT NEW --{option} …`"
                )
        names = ("stratify", "on_error", "nan", "overwrite", "quiet")
        return cls(
            shard_bytes=_parse_size(args.shard_size),
            compression=Compression(args.codec),
            split=parse_split(args.split or "train=1"),
            by_own=not args.split,
            group=args.group or "",
            workers=args.workers or len(os.sched_getaffinity(0)),
            part=_part(args.part),
            command=args.command_line,
            **{name: vars(args)[name] for name in names},
        )

    @property
    def of_result(self) -> dict[str, Any]:
        """Return the options that the bytes of the result depend on; JSON.

        `on_error` is not among them: it only decides whether there is a result.
        """
        compressed = self.compression.codec != "none"
        codec = self.compression.as_json() if compressed else {"codec": "none"}
        return {
            "shard_bytes": self.shard_bytes,
            **codec,
            "split": str(self.split),
            "stratify": self.stratify,
            # Left out where there is none, so that earlier data sets are known again.
            **({"group": self.group} if self.group else {}),
            "dedup": "none",  # an option of before: data sets of then are known again
            "nan": self.nan,
        }

    @property
    def two_passes(self) -> bool:
        """Return whether all samples must be read once before the first one is written."""
        return bool(self.stratify or self.group)

    @property
    def decides_splits(self) -> bool:
        """Return whether all samples together decide the split of each one."""
        return bool(self.stratify or (self.group and isinstance(self.split, Fractions)))

    @property
    def column(self) -> str:
        """Return the column of the source that decides the split, "" for none."""
        return self.split.column if isinstance(self.split, ByColumn) else self.group


def add_options(parser: Any, text: str) -> None:
    """Add arguments to a parser, or to a group of it.

    The text lists them as --help does: a line such as `--pieces N = 3 : int` for each, and its help
    below. `{a,b}` in place of N are the choices, nothing is a switch. `= 3` is the default, which
    the help then names. An option with `...` may be repeated, and its value is a list. The line
    `paths=FILE+ : path` is a positional argument; `[NAME]` begins a group, `[]` ends it, and
    `[one of]` begins options that exclude each other.
    """
    types: dict[str, Callable[[str], Any]] = {"int": int, "path": Path, "positive": positive}
    group = into = parser
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, *lines = entry.split("\n")
        if head.startswith("["):
            if head == "[one of]":
                into = group.add_mutually_exclusive_group()
            else:
                group = into = parser.add_argument_group(head[1:-1]) if head[1:-1] else parser
            continue
        found = _OPTION.fullmatch(head) or _POSITIONAL.fullmatch(head)
        assert found is not None, head
        given, value = found.groupdict(), found["value"]
        about, default = " ".join(filter(None, map(str.strip, lines))), given.get("default")
        more: dict[str, Any] = {"metavar": value, "type": types.get(found["type"], str)}
        if value is None:
            more = {"action": "store_true"}
        elif value.startswith("{"):
            more = {"choices": tuple(value[1:-1].split(","))}
        if default is not None:
            more["default"] = default.strip()
            about += f" (default: {default.strip()})" * bool(default.strip())
        if given.get("many"):
            more |= {"action": "append", "default": []}
            about += " (may be repeated)"
        about = about.replace("%", "%%")
        if given.get("name"):
            nargs = {"nargs": found["nargs"]} if found["nargs"] else {}
            parser.add_argument(found["name"], help=about or None, **more, **nargs)
        else:
            into.add_argument(*found["flags"].split(", "), help=about, **more)


def writing(split: str = "train=1") -> str:
    """Return OUT and the options of every command that writes; `split` is that of `--split`."""
    return _WRITING.replace("SPLIT =", f"SPLIT = {split}".rstrip())


def _parse_size(text: str) -> int:
    """Return the bytes of a size such as "64MB" or "1.5GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if not 1 <= size < 2**63:
        raise ConfigError(
            f"--shard-size {text!r}: give the bytes with a unit, such as 64MB ({', '.join(_UNITS)})"
        )
    return int(size)


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--part {text!r}: it is I/N, such as 1/8 to 8/8")
    return int(match[1]), int(match[2])


def positive(text: str) -> int:
    """Return a whole number from 1 up; the type of an argument for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def pairs(
    option: str, given: Sequence[str], form: str = "NAME=VALUE", *, empty: bool = False
) -> dict[str, str]:
    """Return the names and values of a repeated option."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not (value or empty):
            raise ConfigError(f"{option} {text!r} is not {form}")
        if name in found:
            raise ConfigError(f"{option} {text!r}: {name!r} is there twice; each name once")
        found[name] = value
    return found
