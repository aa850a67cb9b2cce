"""The rules that assign samples to splits.

train=0.9,val=0.1             by a hash of the sample's key: a sample stays in its split when data
                              is added; equal keys are in the same split
column:NAME                   the value of a column of the source is the name of the split
file:train=a-*,val=b-*        the first pattern that matches the sample's file decides

>>> parse_split("train=0.9,val=0.1").of_keys([b"a", b"b"])
['train', 'train']
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import PurePath
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import name_problem
from hpctrain.data.shards.ragged import hash_keys
from hpctrain.data.shards.types import Int64s

FORMS = "NAME=FRACTION,… or column:NAME or file:NAME=PATTERN,…"


@dataclass(frozen=True)
class Fractions:
    """Assigns samples by their hashes to splits; the fractions of the splits add up to 1."""

    fractions: dict[str, float]

    def __str__(self) -> str:
        return ",".join(f"{name}={fraction!r}" for name, fraction in self.fractions.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits, in their order."""
        return tuple(self.fractions)

    def of_keys(self, keys: Iterable[bytes]) -> list[str]:
        """Return the name of the split of each key."""
        return [self.names[number] for number in self.numbers(hash_keys(keys)).tolist()]

    def numbers(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return for each hash the number of its split among the names, (n,)."""
        # The last name takes the rest: rounded, the fractions may add up to a little less than 1.
        ends = np.array([min(round(end * 2**64), 2**64 - 1) for end in self._ends()], np.uint64)
        return np.searchsorted(ends, hashes, side="right")

    def stratified(self, hashes: NDArray[np.uint64], strata: Int64s) -> NDArray[np.intp]:
        """Return for each sample the number of its split, (n,), with equal shares of each stratum.

        The samples of a stratum are sorted by their hashes and cut at the rounded fractions.
        Samples with equal hashes stay together.
        """
        numbers = np.zeros(len(hashes), np.intp)
        order = np.lexsort((hashes, strata))
        _, starts, counts = np.unique(strata[order], return_index=True, return_counts=True)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            rows = order[start : start + count]
            cuts = [round(end * count) for end in self._ends()]
            cut = np.searchsorted(cuts, np.arange(count), side="right")
            first = np.unique(hashes[rows], return_index=True, return_inverse=True)
            numbers[rows] = cut[first[1]][first[2]]
        return numbers

    def _ends(self) -> list[float]:
        """Return the upper end of each fraction but the last."""
        return list(accumulate(self.fractions.values()))[:-1]


@dataclass(frozen=True)
class ByColumn:
    """Takes the name of the split from a column of the source."""

    column: str
    names: ClassVar[tuple[str, ...]] = ()  # they are only known when the column has been read

    def __str__(self) -> str:
        return f"column:{self.column}"


@dataclass(frozen=True)
class ByFile:
    """Takes the split from the first pattern that matches the file's path or name."""

    patterns: dict[str, str]

    def __str__(self) -> str:
        return "file:" + ",".join(f"{name}={pattern}" for name, pattern in self.patterns.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits, in their order."""
        return tuple(self.patterns)

    def of_file(self, file: str) -> str:
        """Return the split of all samples of a file."""
        for name, pattern in self.patterns.items():
            if fnmatchcase(file, pattern) or fnmatchcase(PurePath(file).name, pattern):
                return name
        raise DataError(
            f"--split {self}: no pattern matches {file}: neither all of it (*/folder/*) "
            "nor the name alone (a*)"
        )

    def of_files(self, files: Iterable[str]) -> list[str]:
        """Return the split of each file."""
        found = [self.of_file(file) for file in files]
        if empty := sorted(self.patterns.keys() - set(found)):
            raise DataError(f"--split {self}: no file is left for {', '.join(empty)}")
        return found


Split = Fractions | ByColumn | ByFile


def left_empty(split: Split, found: Collection[str]) -> str:
    """Return a line on the splits that got no sample, and what to do; "" if each got one."""
    empty = [name for name in split.names if name not in found]
    if not empty:
        return ""
    return (
        f"no sample went to {' or '.join(empty)} (--split {split}); `column:` or `file:` chooses, "
        "where a hash of each of few samples decides"
    )


def parse_split(text: str) -> Split:
    """Parse the value of `--split`."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "column" and rest:
        return ByColumn(rest)
    if colon and kind == "file":
        return ByFile(_pairs(text, rest))
    fractions: dict[str, float] = {}
    for name, value in _pairs(text, text).items():
        wrong = f"--split {text!r}: {f'{name}={value}'!r}"
        try:
            fractions[name] = float(value)
        except ValueError:
            raise ConfigError(f"{wrong} is not NAME=FRACTION") from None
        if not 0 < fractions[name] <= 1:
            raise ConfigError(f"{wrong}: a fraction is above 0, up to 1")
    if abs((total := sum(fractions.values())) - 1) > 1e-6:
        raise ConfigError(f"--split {text!r}: the fractions add up to {total:g}, not 1")
    return Fractions(fractions)


def _pairs(text: str, rest: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value or name_problem(name, "split"):
            raise ConfigError(f"--split {text!r}: {part!r}: it is {FORMS}")
        if name in pairs:
            raise ConfigError(f"--split {text!r}: {name!r} is there twice; each name once")
        pairs[name] = value
    return pairs
