"""Show statistics of the fields, as a table or as a page of plots.

The statistics come from the index. Lengths are counted in the data if the index has no statistics
(`data_prep index --no-statistics`). --plot draws samples that are evenly spaced over the split, and
the distribution of the values, classes and lengths, with one colour for each split.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data_prep.datasets.dataset import DataSet, samples_of
from data_prep.show import console
from data_prep.show.views import Summary, class_name
from hpctrain.shards.index import Split
from hpctrain.shards.moments import Moments

MOST = 30  # the most classes that are listed
_BAR = 24  # the length of the longest bar, in characters

ARGUMENTS = f"""{samples_of("show")}
--plot FILE : path
    draw a .png file
--json
    print JSON
"""


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.plot:
        from data_prep.show import page

        page.check(args.plot)
    data = DataSet(args.folder)
    fields, splits = data.fields(args.field), data.splits(args.split)
    summaries = [summarise(data, split, name) for split in splits for name in fields]
    if args.json:
        print(json.dumps([_content(data, summary) for summary in summaries], indent=2))
    else:
        for split in splits:
            _print(data, [summary for summary in summaries if summary.split == split.name])
    if args.plot:
        page.draw(args.plot, data, splits, summaries)
        if not args.json:
            print()
            console.say(f"drawn: {args.plot}")


def summarise(data: DataSet, split: Split, name: str) -> Summary:
    """Return the statistics of the index, and count lengths if it has none."""
    field = data.index.fields[name]
    listed = data.index.statistics.get(split.name, {}).get(name)
    values: dict[str, Any] = asdict(listed) if listed is not None else {}
    if field.variable and values.get("lengths") is None:
        values["lengths"] = _lengths(data, split, name)
    return Summary(split.name, split.count, name, field, **values)


def _lengths(data: DataSet, split: Split, name: str) -> dict[str, float | None]:
    lengths, moments = data.lengths(split, name), Moments()
    moments.add(lengths)
    found = moments.result()
    content = asdict(found)
    numbers = {key: content[key] for key in ("mean", "std", "min", "max")}
    return {**numbers, "total": int(lengths.sum())}


def _content(data: DataSet, summary: Summary) -> dict[str, Any]:
    content = asdict(summary) | {"field": str(summary.field)}
    if summary.classes is not None:
        names = data.categories(summary.name)
        content["classes"] = [
            {"value": value, "name": class_name(value, names), "count": count}
            for value, count in summary.classes.items()
        ]
    return content


def _print(data: DataSet, summaries: Sequence[Summary]) -> None:
    console.title(f"{summaries[0].split}: {summaries[0].count:,} samples")
    rows: list[list[object]] = []
    for s in summaries:
        numbers = [console.number(value) for value in (s.mean, s.std, s.min, s.max)]
        rows.append([s.name, s.field, *numbers, s.not_finite])
    columns = ["field", "type", "mean", "std", "min", "max", "not finite"]
    console.show(columns, rows, numbers="mean std min max")

    rows = []
    for s in summaries:
        if s.lengths is not None:
            lengths = [s.lengths.get(key) for key in ("mean", "std", "min", "max", "total")]
            rows.append([s.name, *map(console.number, lengths)])
    if rows:
        console.title("lengths")
        columns = ["field", "mean", "std", "min", "max", "total"]
        console.show(columns, rows, numbers="mean std min max total")

    for s in summaries:
        if s.classes:
            console.title(f"{s.name}: {len(s.classes):,} values")
            names, most = data.categories(s.name), max(s.classes.values())
            rows = []
            for value, count in list(s.classes.items())[:MOST]:
                bar = "█" * max(1, round(_BAR * count / most))
                share = f"{100 * count / s.count:.1f} %"
                rows.append([value, class_name(value, names), f"{count:,}", share, bar])
            if len(s.classes) > MOST:
                rows.append([f"and {len(s.classes) - MOST:,} more", *[None] * 4])
            columns = ["value", "name", "samples", "share", ""]
            console.show(columns, rows, numbers="value samples share")
