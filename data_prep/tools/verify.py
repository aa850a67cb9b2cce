"""Compare the shards of a data set with its index; see `inspect --verify`."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import console, processes
from data_prep.dataset import moments_of
from data_prep.source import readable
from data_prep.writing.finalize import statistics_of, summary
from data_prep.writing.moments import Moments
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.terminal.progress_bar import ProgressBar
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.ragged import Ragged, hash_rows
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.shards.types import Array

_TOLERANCE = 1e-5  # relative, for mean and standard deviation: sums depend on their order
_SHOWN = 40  # characters of a value

_Problem = tuple[str, str]
"""The path of a shard, "" for the index, and what is wrong."""


def run(folder: Path, index: Index, group: str) -> None:
    """Print what differs, and raise a DataError if something does; see `verify`."""
    group = group or index.group
    if group and group not in index.fields:
        raise ConfigError(f"--group {group}: the fields are {', '.join(index.fields)}")
    problems = verify(folder, index, group, workers=len(os.sched_getaffinity(0)), quiet=False)
    for shard, problem in problems:
        console.say(f"{shard or 'index.json'}: {problem}")
    if problems:
        bad = len({shard for shard, _ in problems if shard})
        count = f"{len(problems)} problem{'s'[: len(problems) != 1]}"
        where = f"{bad} of {len(index.shards)} shards" if bad else "the index"
        raise DataError(f"{folder}: {count}, in {where}")
    what = ["sizes", "schema", "offsets", "digests"]
    what += [f"groups of {group}"] * bool(group) + ["statistics"] * bool(index.statistics)
    checked = f"{', '.join(what[:-1])} and {what[-1]} are as the index says"
    for line in f"{folder}: {checked}: {summary(index)}".splitlines():
        console.say(line)


def verify(
    folder: Path, index: Index, group: str = "", *, workers: int = 1, quiet: bool = True
) -> list[_Problem]:
    """Return all problems of a data set: where its shards differ from its index."""
    shards = index.shards
    samples, nbytes = sum(s.count for s in shards), sum(s.bytes for s in shards)
    task = partial(_look, folder, index, group)
    with ProgressBar(samples, nbytes, quiet=quiet) as progress:
        looks = processes.results(task, len(shards), workers, progress.advance)
    groups = _Groups(group)
    for look in looks:
        groups.merge(look.groups)
    paths = Counter(shard.path for shard in shards)
    return [
        *((path, "the index lists it more than once") for path, n in paths.items() if n > 1),
        *((shards[n].path, problem) for n, look in enumerate(looks) for problem in look.problems),
        *(("", problem) for problem in _wrong_statistics(index, looks)),
        *(("", problem) for problem in groups.problems()),
    ]


class _Groups:
    """Notes which groups each split has."""

    def __init__(self, field: str) -> None:
        self.field = field
        self._found: dict[str, dict[int, str]] = {}  # by split: the hash of a value, and its text

    def add(self, split: str, values: Array | Ragged) -> None:
        """Note the values of some samples of a split."""
        keys, first = np.unique(hash_rows(values), return_index=True)
        known = self._found.setdefault(split, {})
        for key, row in zip(keys.tolist(), first.tolist(), strict=True):
            if key not in known:
                known[key] = _text(values[row])

    def merge(self, other: "_Groups") -> None:
        """Add what another one has noted."""
        for split, found in other._found.items():
            self._found.setdefault(split, {}).update(found)

    def problems(self) -> Iterator[str]:
        """Yield a sentence on each two splits that share groups."""
        for one, other in combinations(self._found, 2):
            first, second = self._found[one], self._found[other]
            if both := [first[key] for key in first if key in second]:
                yield (
                    f"{len(both)} of {len(first | second)} values of {self.field!r} are in both "
                    f"{one!r} and {other!r}, such as {both[0]}"
                )


def _text(value: Array) -> str:
    if value.dtype == np.uint8 and value.ndim == 1:  # a text
        return repr(value.tobytes().decode("utf-8", "replace"))[:_SHOWN]
    return str(value.tolist())[:_SHOWN]


@dataclass
class _Look:
    """The problems and the statistics of one shard."""

    groups: _Groups
    problems: list[str] = field(default_factory=list)
    moments: dict[str, Moments] = field(default_factory=dict)  # by field


def _look(
    folder: Path, index: Index, group: str, number: int, advance: processes.Progress
) -> _Look:
    """Look at a shard."""
    shard, look = index.shards[number], _Look(_Groups(group))
    path = folder / shard.path

    def note(rows: Mapping[str, Any]) -> None:
        if group:
            look.groups.add(shard.split, rows[group])

    try:
        look.moments = moments_of(folder, index.fields, shard, note)
        for name, listed in shard.elements.items():
            if (total := look.moments[name].total) != listed:
                problem = f"field {name!r} has {total} values, the index lists {listed}"
                look.problems.append(problem)
        with readable(path):
            digest = digest_file(path, advance)
        if digest != shard.digest:
            what = f"its content has the digest {digest}, the index lists {shard.digest}"
            look.problems.append(what)
    except MemoryError as error:
        look.problems.append(f"a sample is too large to read: {error}")
    except DataError as error:
        message = str(error).removeprefix(f"shard {path}")
        look.problems.append(message.removeprefix(":").strip())
    advance(shard.count, 0)
    return look


def _wrong_statistics(index: Index, looks: Sequence[_Look]) -> Iterator[str]:
    """Yield wrong statistics, for the splits whose shards have no problem."""
    both = [*zip(index.shards, looks, strict=True)]
    damaged = {shard.split for shard, look in both if look.problems}
    data = statistics_of({shard.split: look.moments} for shard, look in both)
    for split, fields in index.statistics.items():
        for name, listed in () if split in damaged else fields.items():
            found = data.get(split, {}).get(name)
            what = f"its statistics of split {split!r}, field {name!r}"
            if found is None:
                yield f"{what}: there is no such split or field"
            elif not _alike(asdict(listed), asdict(found)):
                yield f"{what} are {listed}; the data has {found}"


def _alike(listed: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether two statistics agree; sums depend on their order."""
    for key, value in listed.items():
        here = found[key]
        if key == "lengths" and None not in (value, here):
            same = _alike(value, here)
        elif key in ("mean", "std") and None not in (value, here):
            same = abs(value - here) <= _TOLERANCE * (abs(found["mean"]) + found["std"])
        else:
            same = value == here
        if not same:
            return False
    return True
