"""Compare the shards of a data set with its index, and print every problem.

--quick opens each file and compares its size, its schema and its number of samples. --full, the
default, also reads everything: it compares the digests and the statistics, and checks the offsets
of variable-length fields, that labels are among their classes, and that no group (--group of the
commands that write) is in two splits. The exit code is 3 when there is a problem. Files that the
index does not list are printed, but are no problem.
"""

import argparse
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.dataset import DataSet
from data_prep.datasets.groups import Groups
from data_prep.datasets.shards import OpenShard
from data_prep.options import DIR
from data_prep.show import console
from data_prep.tools import label_ranges
from data_prep.tools.label_ranges import LabelRanges
from data_prep.writing.finalize import summary
from hpctrain.errors import ConfigError, DataError
from hpctrain.progress_bar import Progress
from hpctrain.shards.commit import PARTIAL
from hpctrain.shards.index import Index, Shard
from hpctrain.shards.moments import Moments
from hpctrain.shards.shard import digest_file

_Advance = Callable[[int, int], None]
"""`advance(samples, bytes)` adds to what is done."""

_MAX_THREADS = 32
HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
TOLERANCE = 1e-5  # relative, for mean and standard deviation: sums depend on their order

ARGUMENTS = f"""{DIR}
[one of]
--quick
    open each file, read no samples
--full
    read everything (the default)
[]
{label_ranges.OPTIONS}
--workers N : positive
    number of threads (default: the cores)
--group FIELD
    no value of this field may be in two splits (default: the field that the data set was split by,
    if it has one)
--json
    print JSON
--quiet
    print problems only
"""


@dataclass(frozen=True)
class Problem:
    """A problem with a shard, or with the data set if `shard` is ""."""

    shard: str
    problem: str


@dataclass(frozen=True)
class Report:
    """The result of `verify`."""

    problems: list[Problem]  # all problems
    # Files in the folders of the data set that are not in the index, but look like shards or like
    # an unfinished conversion.
    unlisted: list[str]


def run(args: argparse.Namespace) -> None:
    """Run the command; see `verify`."""
    data = DataSet(args.folder)
    quiet = args.quiet or args.json
    workers = args.workers or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    group = data.index.group if args.group is None else args.group
    if args.group and args.quick:
        raise ConfigError(f"--group {group} with --quick: it reads no samples; leave one out")
    if group and group not in data.index.fields:
        raise ConfigError(f"--group {group}: the fields are {', '.join(data.index.fields)}")
    labels = LabelRanges(label_ranges.label_counts(data.index, args.labels), args.ignore)
    full = not args.quick
    report = verify(data, group, full=full, workers=workers, quiet=quiet, labels=labels)
    shards = len(data.index.shards)
    if args.json:
        content = {
            "digest": data.index.digest,
            "mode": "quick" if args.quick else "full",
            "shards": shards,
            "bytes": sum(shard.bytes for shard in data.index.shards),
            **asdict(report),
        }
        print(json.dumps(content, indent=2))
    else:
        for found in report.problems:
            console.say(f"{found.shard or 'index.json'}: {found.problem}")
        if report.unlisted and not args.quiet:
            console.say(f"not in the index: {', '.join(report.unlisted)}")
    if report.problems:
        bad = len({found.shard for found in report.problems if found.shard})
        count = f"{len(report.problems)} problem{'s'[: len(report.problems) != 1]}"
        where = f"{bad} of {shards} shards" if bad else "the index"
        raise DataError(f"{args.folder}: {count}, in {where}")
    if not quiet:
        what = ["sizes", "schema", *([] if args.quick else ["offsets", "digests"])]
        what += [f"groups of {group}"] if group and not args.quick else []
        what += ["statistics"] if data.index.statistics and not args.quick else []
        checked = f"{', '.join(what[:-1])} and {what[-1]} are as the index says"
        first, *more = summary(data.index, groups=not args.quick).splitlines()
        console.say(f"{args.folder}: {checked}: {first}")
        for line in more:
            console.say(line)


def verify(
    data: DataSet,
    group: str = "",
    *,
    full: bool = True,
    workers: int = 1,
    quiet: bool = True,
    labels: LabelRanges | None = None,
) -> Report:
    """Compare the shards of a `DataSet` with its index."""
    shards = data.index.shards
    ranges = labels or LabelRanges(label_ranges.label_counts(data.index, ()))
    twice = [path for path, n in Counter(shard.path for shard in shards).items() if n > 1]
    problems = [Problem(path, "the index lists it more than once") for path in twice]
    samples, nbytes = sum(s.count for s in shards), sum(s.bytes for s in shards)
    stop, lock = threading.Event(), threading.Lock()
    with Progress(samples, nbytes if full else 0, quiet=quiet) as progress:

        def advance(more: int, more_bytes: int) -> None:
            with lock:
                progress.advance(more, more_bytes)
            if stop.is_set():
                raise KeyboardInterrupt

        def look_at(shard: Shard) -> _Look:
            look = _Look(shard.split, Groups(group), ranges.of_shard())
            return _look(data, shard, look, full, advance)

        with ThreadPoolExecutor(workers, "verify") as pool:
            try:
                looks = list(pool.map(look_at, shards))
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    for look in looks:
        problems += look.problems
    if full:
        problems += _wrong_statistics(data.index, looks)
        groups = Groups(group)
        for look in looks:
            groups.merge(look.groups)
        problems += [Problem("", problem) for problem in groups.problems()]
    return Report(problems, _unlisted(data))


@dataclass
class _Look:
    """The problems and the statistics of one shard."""

    split: str
    groups: Groups
    labels: LabelRanges
    problems: list[Problem] = field(default_factory=list)
    moments: dict[str, Moments] = field(default_factory=dict)


def _look(data: DataSet, shard: Shard, look: _Look, full: bool, advance: _Advance) -> _Look:
    try:
        for problem in _problems(data, shard, full, advance, look):
            look.problems.append(Problem(shard.path, problem))
    except DataError as error:
        message = str(error).removeprefix(f"shard {data.folder / shard.path}")
        look.problems.append(Problem(shard.path, message.removeprefix(":").strip()))
    advance(0 if full and not look.problems else shard.count, 0)
    look.problems += [Problem(shard.path, problem) for problem in look.labels.problems()]
    return look


def _problems(
    data: DataSet, shard: Shard, full: bool, advance: _Advance, look: _Look
) -> Iterator[str]:
    with OpenShard(data.folder / shard.path, shard, data.index.fields) as opened:
        wrong = list(opened.problems())
        yield from wrong
        if not full:
            return
        try:
            digest = digest_file(opened.path, advance)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}") from None
        if digest != shard.digest:
            yield f"its content has the digest {digest}, the index lists {shard.digest}"
        if wrong:
            return  # the values cannot be read
        opened.check_offsets()
        if digest != shard.digest:
            return
        start = 0
        for rows in opened.blocks(shard.count):
            if look.groups.field:
                look.groups.add(shard.split, rows[look.groups.field])
            values: Any
            for name, values in rows.items():
                look.labels.add(name, values, start)
                moments = look.moments.setdefault(name, Moments(len(rows)))
                if isinstance(values, np.ndarray) or hasattr(moments, "lengths"):
                    moments.add(values)
            advance(len(values), 0)
            start += len(values)


def _wrong_statistics(index: Index, looks: Sequence[_Look]) -> Iterator[Problem]:
    """Yield wrong statistics, for the splits whose shards have no problem."""
    damaged = {look.split for look in looks if look.problems}
    for split, listed in index.statistics.items():
        if split in damaged:
            continue
        for name, values in listed.items():
            total, seen = Moments(len(index.fields)), False
            for look in looks:
                if look.split == split and name in look.moments:
                    total.merge(look.moments[name])
                    seen = True
            if not seen:
                known = split in index.splits and name in index.fields
                if not known:
                    yield Problem("", f"statistics of {split}/{name}, which it does not list")
                continue
            for key, there, here in _differences(asdict(values), asdict(total.result())):
                yield Problem(
                    "",
                    f"split {split!r}, field {name!r}: it lists {key} {there}, the data has {here}",
                )


def _differences(
    listed: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (statistic, listed, found) where they do not agree."""
    for key, value in listed.items():
        here = found.get(key)
        if isinstance(value, Mapping) and isinstance(here, Mapping) and key != "classes":
            for name, *pair in _differences(value, here):
                yield f"{key}.{name}", *pair
        elif key in ("mean", "std") and None not in (value, here):
            scale = abs(found["mean"]) + found["std"]
            if not abs(value - here) <= TOLERANCE * scale:
                yield key, value, here
        elif value != here:
            yield key, value, here


def _unlisted(data: DataSet) -> list[str]:
    """Return the files that look like shards, and folders of an unfinished conversion."""
    listed = {shard.path for shard in data.index.shards}
    found = []
    for folder in sorted({os.path.dirname(path) for path in listed} | {""}):
        try:
            names = sorted(os.listdir(data.folder / folder))
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}" if folder else name
            if path not in listed and (name == PARTIAL or Path(name).suffix.lower() in HDF5):
                found.append(path)
    return found
