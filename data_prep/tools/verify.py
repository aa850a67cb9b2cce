"""Compare the shards of a data set with its index; see `inspect --verify`."""

import argparse
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from data_prep.datasets.dataset import DataSet
from data_prep.datasets.groups import Groups
from data_prep.datasets.shards import OpenShard
from data_prep.show import console
from data_prep.writing.finalize import statistics_of, summary
from hpctrain.errors import ConfigError, DataError
from hpctrain.progress_bar import Progress
from hpctrain.shards.index import Index, Shard
from hpctrain.shards.moments import Moments
from hpctrain.shards.shard import digest_file

_Advance = Callable[[int, int], None]
"""`advance(samples, bytes)` adds to what is done."""

_MAX_THREADS = 32
_TOLERANCE = 1e-5  # relative, for mean and standard deviation: sums depend on their order


@dataclass(frozen=True)
class _Problem:
    """A problem with a shard, or with the data set if `shard` is ""."""

    shard: str
    problem: str


def run(data: DataSet, args: argparse.Namespace) -> None:
    """Print what differs, and raise a DataError if something does; see `verify`."""
    index = data.index
    group = args.group or index.group
    if group and group not in index.fields:
        raise ConfigError(f"--group {group}: the fields are {', '.join(index.fields)}")
    workers = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    problems = verify(data, group, workers=workers, quiet=False)
    for found in problems:
        console.say(f"{found.shard or 'index.json'}: {found.problem}")
    if problems:
        bad = len({found.shard for found in problems if found.shard})
        count = f"{len(problems)} problem{'s'[: len(problems) != 1]}"
        where = f"{bad} of {len(index.shards)} shards" if bad else "the index"
        raise DataError(f"{data.folder}: {count}, in {where}")
    what = ["sizes", "schema", "offsets", "digests"]
    what += [f"groups of {group}"] * bool(group) + ["statistics"] * bool(index.statistics)
    checked = f"{', '.join(what[:-1])} and {what[-1]} are as the index says"
    for line in f"{data.folder}: {checked}: {summary(index)}".splitlines():
        console.say(line)


def verify(
    data: DataSet, group: str = "", *, workers: int = 1, quiet: bool = True
) -> list[_Problem]:
    """Return all problems of a `DataSet`: where its shards differ from its index."""
    index, shards = data.index, data.index.shards
    twice = [path for path, n in Counter(shard.path for shard in shards).items() if n > 1]
    problems = [_Problem(path, "the index lists it more than once") for path in twice]
    samples, nbytes = sum(s.count for s in shards), sum(s.bytes for s in shards)
    stop, lock = threading.Event(), threading.Lock()
    with Progress(samples, nbytes, quiet=quiet) as progress:

        def advance(more: int, more_bytes: int) -> None:
            with lock:
                progress.advance(more, more_bytes)
            if stop.is_set():
                raise KeyboardInterrupt

        def look_at(shard: Shard) -> _Look:
            return _Look(data, shard, Groups(group)).done(advance)

        with ThreadPoolExecutor(workers, "verify") as pool:
            try:
                looks = list(pool.map(look_at, shards))
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    problems += [_Problem(look.shard.path, problem) for look in looks for problem in look.problems]
    groups = Groups(group)
    for look in looks:
        groups.merge(look.groups)
    wrong = (*_wrong_statistics(index, looks), *groups.problems())
    return problems + [_Problem("", problem) for problem in wrong]


@dataclass
class _Look:
    """The problems and the statistics of one shard."""

    data: DataSet
    shard: Shard
    groups: Groups
    problems: list[str] = field(default_factory=list)
    moments: dict[str, Moments] = field(default_factory=dict)

    def done(self, advance: _Advance) -> "_Look":
        """Look at the shard, and return this."""
        path = self.data.folder / self.shard.path
        try:
            self._read(OpenShard(path, self.shard, self.data.index.fields), advance)
        except DataError as error:
            message = str(error).removeprefix(f"shard {path}")
            self.problems.append(message.removeprefix(":").strip())
        advance(self.shard.count if self.problems else 0, 0)
        return self

    def _read(self, opened: OpenShard, advance: _Advance) -> None:
        try:
            digest = digest_file(opened.path, advance)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}") from None
        if digest != self.shard.digest:
            listed = self.shard.digest
            self.problems.append(f"its content has the digest {digest}, the index lists {listed}")
        opened.check_offsets()
        if digest != self.shard.digest:
            return
        for rows in opened.blocks():
            if self.groups.field:
                self.groups.add(self.shard.split, rows[self.groups.field])
            values: Any
            for name, values in rows.items():
                self.moments.setdefault(name, Moments(len(rows))).add(values)
            advance(len(values), 0)


def _wrong_statistics(index: Index, looks: Sequence[_Look]) -> Iterator[str]:
    """Yield wrong statistics, for the splits whose shards have no problem."""
    damaged = {look.shard.split for look in looks if look.problems}
    states = (
        {look.shard.split: {name: moments.state() for name, moments in look.moments.items()}}
        for look in looks
    )
    data = statistics_of(states)
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
