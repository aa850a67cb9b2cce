"""`python -m hpctrain compare`: what differs between two runs, and the first step they part."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpctrain.console import Cell, Console, Table, print_json
from hpctrain.errors import ConfigError
from hpctrain.report.account.run_account import RunAccount, read
from hpctrain.report.differences import Differences, differences
from hpctrain.runs.state.select import add_dir, select


def main(argv: Sequence[str]) -> int:
    """Print what differs between two runs; return the exit code."""
    options = _parse(argv)
    paths = select(options.dir, options.runs)
    if len(paths) != 2:
        names = ", ".join(path.name for path in paths[:5]) + ", ..." * (len(paths) > 5)
        raise ConfigError(f"compare {' '.join(options.runs)}: it takes two runs, and got {names}")
    left, right = read(paths)
    for account in (left, right):
        if damage := account.facts.damage or ("" if account.config else account.left_out[0]):
            raise ConfigError(f"{account.name} cannot be compared: {damage}")
    found = differences(left, right)
    if options.json:
        print_json(asdict(found) | {"runs": [left.name, right.name]})
    else:
        _show(left, right, found)
    return 0


def _show(left: RunAccount, right: RunAccount, found: Differences) -> None:
    console = Console()
    names = [left.name, right.name]
    _table(console, "Config", names, found.config, "the same")
    for title, lines in (("Code", found.code), ("Data", found.data)):
        console.print(title, style="bold")
        for line in lines or ["the same"]:
            console.print("  ", Cell(line), sep="")
        console.print()
    _table(console, "Packages", names, found.packages, "the same")
    rows: dict[str, tuple[Any, Any]] = {
        name: (f"{a:.6g}", f"{b:.6g}") for name, (a, b) in found.metrics.items()
    }
    _table(console, "Metrics at the end", names, rows, "none that both have")
    for line in found.left_out:
        console.print("left out: ", Cell(line), sep="")
    console.print(_parting(found), highlight=False)


def _parting(found: Differences) -> str:
    first = found.parting
    if first is not None:
        return (
            f"The runs part at step {first.step:,}: {first.metric} is {first.left:.9g} "
            f"and {first.right:.9g}."
        )
    if not found.shared:
        return "It is not known where the runs part: they have no step in common."
    return f"The runs do not part: all metrics are equal at the {found.shared:,} common steps."


def _table(
    console: Console, title: str, names: list[str], rows: dict[str, tuple[Any, Any]], empty: str
) -> None:
    console.print(title, style="bold")
    if not rows:
        console.print(f"  {empty}\n")
        return
    table = Table("", *names)
    for name, values in rows.items():
        table.add_row(name, *("-" if v is None else str(v) for v in values))
    console.print(table)
    console.print()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain compare",
        description="Show what differs between two runs, and the first step at which they part.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a directory, or the start of a name; or one folder that holds two runs",
    )
    add_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser.parse_args(argv)
