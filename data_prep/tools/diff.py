"""Show the differences of two data sets: schema, splits, samples, and how they were made.

Samples are compared by a hash of their content. So a sample is also found in another place, shard
or split. The comparison needs about 100 bytes of memory for each sample of a split. The exit code
is like that of diff(1): 0 when the samples are the same in the same order, 1 when they differ, and
higher after an error. Differences in shards, codecs or options are printed but do not count.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.datasets.dataset import DataSet, sizes
from data_prep.datasets.shards import Rows
from data_prep.progress_bar import Progress
from data_prep.show import console
from hpctrain.data.ragged import Ragged

LOOKED_AT = 1000  # the most differing samples that are compared field by field

Hashes = NDArray[np.void]  # (n,) of 16 bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("a", type=Path, metavar="A", help="folder of a data set")
    parser.add_argument("b", type=Path, metavar="B", help="folder of another data set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing; only set the exit code"
    )


@dataclass
class Difference:
    """The differences of two data sets.

    Attributes:
        schema: Fields that differ or that only one data set has.
        samples: For each split, the differences of its samples.
        made: Differences in how the data sets were made or stored; they do not count.
    """

    schema: list[str] = field(default_factory=list)
    samples: dict[str, list[str]] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Return whether both data sets have the same samples in the same order."""
        return not self.schema and not any(self.samples.values())


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 when the data sets are equal, 1 when they differ.

    Raises:
        DataError: A data set is missing or damaged.
    """
    a, b = DataSet(args.a), DataSet(args.b)
    found = difference(a, b, quiet=args.quiet or args.json)
    if args.json:
        print(json.dumps({"equal": found.equal, **asdict(found)}, indent=2))
    elif not args.quiet:
        _print(a, b, found)
    return 0 if found.equal else 1


def difference(a: DataSet, b: DataSet, *, quiet: bool = True) -> Difference:
    """Compare two data sets; samples are read only if the digests of the indexes differ.

    Raises:
        DataError: A shard is missing or damaged.
    """
    found = Difference(made=list(_made(a, b)))
    if a.index.digest == b.index.digest:
        a.index.check(a.folder)
        b.index.check(b.folder)
        return found
    found.schema = list(_schema(a, b))
    ours, theirs = a.index.fields, b.index.fields
    if common := sorted(name for name in ours if ours[name] == theirs.get(name)):
        found.samples = _Samples(a, b, common, quiet).compare()
    else:
        found.samples = {"": ["no field is in both: no sample can be compared"]}
    return found


def _schema(a: DataSet, b: DataSet) -> Iterator[str]:
    for name in {**a.index.fields, **b.index.fields}:
        one, other = a.index.fields.get(name), b.index.fields.get(name)
        if one is None or other is None:
            yield f"field {name} {one or other} is only in {'B' if one is None else 'A'}"
        elif one != other:
            yield f"field {name} is {one} in A, {other} in B"
        elif list(a.categories(name)) != list(b.categories(name)):
            yield f"field {name}: {_categories(a.categories(name), b.categories(name))}"


def _categories(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if not (ours and theirs):
        return f"only {'A' if ours else 'B'} has names for its values"
    pairs = enumerate(zip_longest(ours, theirs, fillvalue="none"))
    at, pair = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return f"other categories: {at} is {pair[0]!r} in A, {pair[1]!r} in B"


def _made(a: DataSet, b: DataSet) -> Iterator[str]:
    one, other = len(a.index.shards), len(b.index.shards)
    if one != other:
        yield f"shards: {one:,} in A, {other:,} in B"
    first, second = (dict(_flat(data.index.provenance)) for data in (a, b))
    if not (first and second):
        if first or second:
            yield f"{'B' if first else 'A'} does not say how it was made"
        return
    for key in {**first, **second}:
        if key.startswith("source.from.provenance."):  # the provenance of a repacked data set
            continue
        if key not in ("created", "fingerprint") and first.get(key) != second.get(key):
            yield f"{key}: {first.get(key, 'none')} in A, {second.get(key, 'none')} in B"


def _flat(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, content if isinstance(content, str) else json.dumps(content)


class _Samples:
    """Compares the samples of two data sets in the fields that they share."""

    def __init__(self, a: DataSet, b: DataSet, names: Sequence[str], quiet: bool) -> None:
        self.a, self.b, self.fields, self.quiet = a, b, names, quiet

    def compare(self) -> dict[str, list[str]]:
        """Return the differences by split."""
        names = list(dict.fromkeys([*self.a.index.splits, *self.b.index.splits]))
        found: dict[str, list[str]] = {}
        total = sum(shard.count for data in (self.a, self.b) for shard in data.index.shards)
        nbytes = sum(shard.bytes for data in (self.a, self.b) for shard in data.index.shards)
        left: dict[str, tuple[Hashes, Hashes]] = {}  # the samples that only A or only B has
        with Progress(total, nbytes, quiet=self.quiet) as progress:
            for name in names:
                a, b = (self._hashes(data, name, progress.advance) for data in (self.a, self.b))
                found[name] = []
                left[name] = a[:0], b[:0]
                if len(a) == len(b) and (a == b).all():
                    continue
                only_a, only_b = _only(a, b)
                left[name] = a[only_a], b[only_b]
                found[name] = list(self._lines(name, a, b, only_a, only_b))
        for name in names:
            for other in names:
                if other != name and (moved := _shared(left[name][0], left[other][1])):
                    found[name].append(f"{moved:,} of A's {name} are in B's {other}")
        return found

    def _hashes(self, data: DataSet, split: str, advance: Any) -> Hashes:
        """Return the hashes of all samples of a split, in their order."""
        if split not in data.index.splits:
            return np.empty(0, "V16")
        parts, fields = (
            [],
            data.fields(self.fields),
        )  # A and B may store a field in different places
        for rows in data.blocks(data.index.split(split), fields):
            parts.append(hashes(rows))
            advance(len(parts[-1]), sizes(rows, fields))
        return np.concatenate(parts)

    def _lines(
        self, split: str, a: Hashes, b: Hashes, only_a: NDArray[Any], only_b: NDArray[Any]
    ) -> Iterator[str]:
        for data, name in ((self.a, "A"), (self.b, "B")):
            if split not in data.index.splits:
                there = "B" if name == "A" else "A"
                yield f"is only in {there}: {len(a) + len(b):,} samples"
                return
        if len(a) != len(b):
            yield f"{len(a):,} samples in A, {len(b):,} in B"
        if not len(only_a) and not len(only_b):
            yield f"the same samples in another order (first: {split} {int(np.argmax(a != b))})"
            return
        for name, only in (("A", only_a), ("B", only_b)):
            if len(only):
                samples = "1 sample is" if len(only) == 1 else f"{len(only):,} samples are"
                yield f"{samples} only in {name} (first: {split} {only[0]})"
        both = np.intersect1d(only_a, only_b)
        if len(both) and len(a) == len(b):
            yield from self._values(split, both)

    def _values(self, split: str, numbers: NDArray[Any]) -> Iterator[str]:
        """Yield the fields in which samples with the same number differ."""
        chosen = numbers[:LOOKED_AT].tolist()
        one, other = (
            data.take(data.index.split(split), data.fields(self.fields), chosen)
            for data in (self.a, self.b)
        )
        counts, most = dict.fromkeys(self.fields, 0), dict.fromkeys(self.fields, 0.0)
        for (_, ours), (_, theirs) in zip(one, other, strict=True):
            for name in self.fields:
                x, y = ours[name], theirs[name]
                if x.tobytes() == y.tobytes() and x.shape == y.shape:
                    continue
                counts[name] += 1
                if x.shape == y.shape and x.size:
                    with np.errstate(invalid="ignore", over="ignore"):
                        gap = np.abs(x.astype(np.float64) - y.astype(np.float64))
                    most[name] = max(most[name], float(np.nanmax(gap, initial=0.0)))
        first = "" if len(chosen) == len(numbers) else "the first "
        for name, count in counts.items():
            if count:
                by = f", by up to {most[name]:.4g}" if most[name] else ""
                yield f"of {first}{len(chosen):,} that differ: {count:,} in field {name}{by}"


def hashes(rows: Rows) -> Hashes:
    """Return a hash of each sample's values and lengths of sequences; (n,) of 16 bytes."""
    fixed = [
        np.ascontiguousarray(value).view(np.uint8).reshape(len(value), -1)
        for value in rows.values()
        if not isinstance(value, Ragged)
    ]
    ragged = [value for value in rows.values() if isinstance(value, Ragged)]
    joined = np.concatenate(fixed, axis=1) if len(fixed) > 1 else fixed[0] if fixed else None
    count = len(next(iter(rows.values())))
    if joined is not None and not ragged:
        return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, joined)), "V16")
    digests = []
    for i in range(count):
        digest = xxhash.xxh3_128(b"" if joined is None else joined[i].data)
        for value in ragged:
            sample = np.ascontiguousarray(value[i])
            digest.update(len(sample).to_bytes(8, "little"))
            digest.update(sample.view(np.uint8).data)
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), "V16")


def _only(a: Hashes, b: Hashes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the numbers of the samples that only A has, and of those that only B has.

    Of samples that are equal among themselves, the last ones count as the surplus.
    """
    halves = np.concatenate([a, b]).view(np.uint64).reshape(-1, 2)
    order = np.lexsort(halves.T)  # several times as fast as np.unique of 16 bytes
    new = (np.diff(halves[order], axis=0) != 0).any(axis=1)
    where = np.empty(len(order), np.int64)
    where[order] = np.concatenate([[0], np.cumsum(new)])[: len(order)]
    in_a, in_b = where[: len(a)], where[len(a) :]
    kinds = int(where.max()) + 1 if len(where) else 0
    counts_a, counts_b = np.bincount(in_a, minlength=kinds), np.bincount(in_b, minlength=kinds)
    return _beyond(in_a, counts_b), _beyond(in_b, counts_a)


def _beyond(kinds: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """Return the places where a kind occurs more often than `counts` allows, ascending."""
    order = np.argsort(kinds, kind="stable")
    ordered = kinds[order]
    first = np.searchsorted(ordered, ordered)  # the first place of each kind
    seen = np.arange(len(ordered)) - first
    return np.sort(order[seen >= counts[ordered]])


def _shared(a: Hashes, b: Hashes) -> int:
    """Return how many samples of `a` are also in `b`; repeated samples count repeatedly."""
    return len(a) - len(_only(a, b)[0])


def _print(a: DataSet, b: DataSet, found: Difference) -> None:
    console.say(f"A  {a.folder}  {a.index.digest}")
    console.say(f"B  {b.folder}  {b.index.digest}")
    for line in found.schema:
        console.say(line)
    for split, lines in found.samples.items():
        for line in lines:
            console.say(f"{split}: {line}" if split else line)
    if found.equal:
        console.say("the same samples in the same order")
    if found.made:
        console.title("how they were made (no difference of the data)")
        for line in found.made:
            console.say(f"  {line}")
