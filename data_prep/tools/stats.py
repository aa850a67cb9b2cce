"""Show statistics of the fields, as a table or as a page of plots.

The statistics come from the index. Lengths are counted in the data if the index has no statistics
(`data_prep index --no-statistics`). --plot draws samples that are evenly spaced over the split, and
the distribution of the values, classes and lengths, with one colour for each split.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from data_prep.datasets.dataset import DataSet, samples_of
from data_prep.show import console
from data_prep.show.views import Summary, class_name
from hpctrain.shards.index import Lengths, Split, Statistics
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
    values = data.index.statistics.get(split.name, {}).get(name)
    values = values or Statistics(None, None, None, None)
    if field.variable and values.lengths is None:
        lengths, moments = data.lengths(split, name), Moments()
        moments.add(lengths)
        found: Any = moments.result()
        numbers = (found.mean, found.std, found.min, found.max, int(lengths.sum()))
        values = replace(values, lengths=Lengths(*numbers))
    return Summary(split.name, split.count, name, field, values)


def _content(data: DataSet, summary: Summary) -> dict[str, Any]:
    content = asdict(summary) | {"field": str(summary.field)}
    content |= content.pop("values")
    if summary.values.classes is not None:
        names = data.categories(summary.name)
        content["classes"] = [
            {"value": value, "name": class_name(value, names), "count": count}
            for value, count in summary.values.classes.items()
        ]
    return content


def _print(data: DataSet, summaries: Sequence[Summary]) -> None:
    def numbers(values: Statistics | Lengths) -> list[str]:
        return [console.number(v) for v in (values.mean, values.std, values.min, values.max)]

    console.title(f"{summaries[0].split}: {summaries[0].count:,} samples")
    rows: list[list[object]] = [
        [s.name, s.field, *numbers(s.values), s.not_finite] for s in summaries
    ]
    columns = ["field", "type", "mean", "std", "min", "max", "not finite"]
    console.show(columns, rows, numbers="mean std min max")

    found = [(s.name, s.values.lengths) for s in summaries if s.values.lengths is not None]
    if found:
        console.title("lengths")
        columns = ["field", "mean", "std", "min", "max", "total"]
        rows = [[name, *numbers(each), console.number(each.total)] for name, each in found]
        console.show(columns, rows, numbers="mean std min max total")

    for s in summaries:
        if classes := s.values.classes:
            console.title(f"{s.name}: {len(classes):,} values")
            names, most = data.categories(s.name), max(classes.values())
            rows = []
            for value, count in list(classes.items())[:MOST]:
                bar = "█" * max(1, round(_BAR * count / most))
                share = f"{100 * count / s.count:.1f} %"
                rows.append([value, class_name(value, names), f"{count:,}", share, bar])
            if len(classes) > MOST:
                rows.append([f"and {len(classes) - MOST:,} more", *[None] * 4])
            columns = ["value", "name", "samples", "share", ""]
            console.show(columns, rows, numbers="value samples share")
