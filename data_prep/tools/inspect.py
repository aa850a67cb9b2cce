"""What a data set holds, as a table or JSON."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from hpctrain.data.index import Index
from hpctrain.errors import DataError

MOST = 20  # shards listed


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the data set")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> None:
    """Do it; see `show`."""
    show(args.out, as_json=args.json)


def show(folder: Path, *, as_json: bool = False) -> None:
    """Print the fields, splits, shards and provenance of a data set.

    Raises:
        DataError: There is none, or a shard is missing or has another size (after printing).
    """
    index = Index.load(folder)
    problem = ""
    try:
        index.check(folder)
    except DataError as error:
        problem = str(error)
    if as_json:
        print(json.dumps(_content(index, problem), indent=2))
    else:
        _print_tables(folder, index)
    if problem:
        raise DataError(problem)


def _content(index: Index, problem: str) -> dict[str, object]:
    return {
        "digest": index.digest,
        "problem": problem or None,
        "fields": {name: asdict(field) for name, field in index.fields.items()},
        "splits": {name: index.split(name).count for name in index.splits},
        "shards": [asdict(shard) for shard in index.shards],
        "statistics": {
            split: {name: asdict(values) for name, values in fields.items()}
            for split, fields in index.statistics.items()
        },
        "provenance": dict(index.provenance),
    }


def _print_tables(folder: Path, index: Index) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(folder))}[/]  {index.digest}")

    fields = Table("field", "type", title="fields, statistics of the first split")
    for column in ("mean", "std", "min", "max", "not finite"):
        fields.add_column(column, justify="right")
    statistics = index.statistics.get(index.splits[0], {})
    for name, field in index.fields.items():
        values = statistics.get(name)
        numbers = [values.mean, values.std, values.min, values.max] if values else []
        texts = ["-" if number is None else f"{number:.4g}" for number in numbers]
        fields.add_row(
            name, escape(str(field)), *texts, *([str(values.nonfinite)] if values else [])
        )
    console.print(fields)

    shards = Table("split", "shard", title="shards")
    for column in ("samples", "MB"):
        shards.add_column(column, justify="right")
    shards.add_column("digest", overflow="fold")
    for split in map(index.split, index.splits):
        size = sum(shard.bytes for shard in split.shards)
        total = f"{len(split.shards)} in all"
        shards.add_row(f"[bold]{split.name}[/]", total, f"{split.count:,}", f"{size / 1e6:,.1f}")
        for shard in split.shards[:MOST]:
            samples, megabytes = f"{shard.count:,}", f"{shard.bytes / 1e6:,.1f}"
            shards.add_row("", escape(shard.path), samples, megabytes, shard.digest)
        if len(split.shards) > MOST:
            shards.add_row("", f"and {len(split.shards) - MOST} more")
    console.print(shards)

    console.print("provenance")
    for key, value in index.provenance.items():
        text = value if isinstance(value, str) else json.dumps(value)
        console.print(f"  {key}: {escape(text)}", soft_wrap=True)
