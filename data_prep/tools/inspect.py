"""Show what a data set holds: schema, splits, ranges, and the provenance.

With --verify compare the shards with the index, and print every problem. --verify reads everything:
it compares the digests and the statistics, and checks the offsets of variable-length fields, and
that no group (--group of the commands that write) is in two splits. The exit code is 3 when there
is a problem.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep import console
from data_prep.dataset import load
from data_prep.options import DIR
from data_prep.tools import verify
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.index import Index, Statistics

MOST = 20  # categories listed
ARGUMENTS = f"""{DIR}
--verify
    compare the shards with the index
--group FIELD
    with --verify: no value of this field may be in two splits (default: the field that the data set
    was split by, if it has one)
"""


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.group and not args.verify:
        raise ConfigError("--group is for --verify: give both, or none")
    index = load(args.folder)
    if args.verify:
        verify.run(args.folder, index, args.group)
        return
    _print(args.folder, index)
    try:
        index.check(args.folder)
    except DataError as error:
        more = "`python -m data_prep inspect --verify` lists every problem"
        raise DataError(f"{error}. {more}") from None


def _print(folder: Path, index: Index) -> None:
    counts = {name: index.split(name).count for name in index.splits}
    size = console.size(sum(shard.bytes for shard in index.shards))
    console.say(str(folder))
    console.say(f"{sum(counts.values()):,} samples, {len(index.shards):,} shards, {size}")
    console.say(index.digest)

    console.title("fields")
    rows: list[list[str | None]] = [[name, str(field)] for name, field in index.fields.items()]
    console.show(["field", "one sample"], rows)
    for name in index.fields:
        names = index.categories.get(name, ())
        if all(text == str(i) for i, text in enumerate(names)):
            continue  # there are no names, or they are the numbers
        more = f" … {len(names):,} in all" if len(names) > MOST else ""
        shown = ", ".join(f"{i} {text}" for i, text in enumerate(names[:MOST]))
        console.say(f"{name}: {shown}{more}")

    whole = sum(counts.values())
    rows = []
    for split in map(index.split, index.splits):
        nbytes = console.size(sum(shard.bytes for shard in split.shards))
        share = f"{100 * split.count / whole:.1f} %"
        rows.append([split.name, f"{split.count:,}", share, f"{len(split.shards):,}", nbytes])
    columns = ["split", "samples", "share", "shards", "size"]
    console.title("splits")
    console.show(columns, rows, numbers="samples share shards size")

    rows = [
        [split, name, *map(console.number, (s.mean, s.std, s.min, s.max)), *_more(s)]
        for split, fields in index.statistics.items()
        for name, s in fields.items()
    ]
    columns = ["split", "field", "mean", "std", "min", "max", "not finite", "lengths", "classes"]
    console.title("values")
    console.show(columns, rows, numbers="mean std min max classes")

    if index.provenance:
        console.title("how it was made")
        console.show([], [[key, value] for key, value in _flat(index.provenance)])


def _more(values: Statistics) -> Iterator[str]:
    """Yield how many values are not finite, the range of the lengths, and the number of classes."""
    counts = {"NaN": values.nan, "infinite": values.nonfinite - values.nan}
    yield ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    yield f"{values.lengths.min} to {values.lengths.max}" if values.lengths else ""
    yield f"{len(values.classes):,}" if values.classes else ""


def _flat(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of nested mappings as ("source.name", "digits")."""
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, content if isinstance(content, str) else json.dumps(content)
