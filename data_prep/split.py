"""Which split a sample goes to.

train=0.9,val=0.1             by a hash of its key: it stays where it is when data is added,
and equal samples are together
column:NAME                   as a column of the source says
file:train=a-*,val=b-*        as the name of its file matches

>>> parse_split("train=0.9,val=0.1").of_keys([b"a", b"b"])
['train', 'train']
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import PurePath

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.index import check_name
from hpctrain.errors import ConfigError, DataError

FORMS = "NAME=FRACTION,… or column:NAME or file:NAME=PATTERN,…"


@dataclass(frozen=True)
class Fractions:
    """Names with fractions that add up to 1."""

    fractions: dict[str, float]

    def __str__(self) -> str:
        return ",".join(f"{name}={fraction:g}" for name, fraction in self.fractions.items())

    def of(self, key: bytes) -> str:
        """The split of the sample with this key."""
        return self.of_hash(xxhash.xxh3_64_intdigest(key))

    def of_hash(self, value: int) -> str:
        """The split of a 64-bit hash."""
        place = value / 2**64
        for name, end in zip(self.fractions, accumulate(self.fractions.values()), strict=True):
            if place < end:
                return name
        return name  # rounding: the fractions add up to a little less than 1

    def of_keys(self, keys: Iterable[bytes]) -> list[str]:
        """The split of each key."""
        if len(self.fractions) == 1:
            return list(self.fractions) * len(list(keys))
        return [self.of(key) for key in keys]

    def stratified(self, hashes: NDArray[np.uint64], strata: Sequence[object]) -> list[str]:
        """The split of each sample, such that each stratum has the same proportions.

        In a stratum the samples stand in the order of their hashes, and are cut at the
        fractions, rounded.
        """
        names = list(self.fractions)
        result = [""] * len(hashes)
        ends = list(accumulate(self.fractions.values()))
        members: dict[object, list[int]] = {}
        for i, stratum in enumerate(strata):
            members.setdefault(stratum, []).append(i)
        for rows in members.values():
            rows.sort(key=lambda i: (int(hashes[i]), i))
            cuts = [round(end * len(rows)) for end in ends[:-1]] + [len(rows)]
            for name, first, last in zip(names, [0, *cuts], cuts, strict=False):
                for i in rows[first:last]:
                    result[i] = name
        return result


@dataclass(frozen=True)
class ByColumn:
    """As a column of the source says."""

    column: str

    def __str__(self) -> str:
        return f"column:{self.column}"


@dataclass(frozen=True)
class ByFile:
    """As the first pattern that a file's path or name matches says."""

    patterns: dict[str, str]

    def __str__(self) -> str:
        return "file:" + ",".join(f"{name}={pattern}" for name, pattern in self.patterns.items())

    def of_file(self, file: str) -> str:
        """The split of all samples of a file.

        Raises:
            DataError: No pattern matches.
        """
        for name, pattern in self.patterns.items():
            if fnmatchcase(file, pattern) or fnmatchcase(PurePath(file).name, pattern):
                return name
        raise DataError(f"--split {self}: no pattern matches {file}")


Split = Fractions | ByColumn | ByFile


def parse_split(text: str) -> Split:
    """Read one of the three forms.

    Raises:
        ConfigError: It is none, or the fractions do not add up to 1.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "column" and rest:
        return ByColumn(rest)
    if colon and kind == "file":
        return ByFile(_pairs(text, rest))
    fractions: dict[str, float] = {}
    for name, value in _pairs(text, text).items():
        try:
            fractions[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--split {text!r}: {f'{name}={value}'!r} is not NAME=FRACTION"
            ) from None
        if not 0 < fractions[name] <= 1:
            raise ConfigError(
                f"--split {text!r}: {f'{name}={value}'!r}: a fraction is above 0, up to 1"
            )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ConfigError(
            f"--split {text!r}: the fractions add up to {sum(fractions.values()):g}, not 1"
        )
    return Fractions(fractions)


def _pairs(text: str, rest: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            check_name(name, "split")
        except DataError:
            equals = ""
        if not equals or not value:
            raise ConfigError(f"--split {text!r}: {part!r}: it is {FORMS}")
        if name in pairs:
            raise ConfigError(f"--split {text!r}: {name!r} is there twice; each name once")
        pairs[name] = value
    return pairs
