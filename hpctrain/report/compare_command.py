"""`python -m hpctrain report --compare`: what differs between two runs, and where they part.

Two runs differ in their config, code, data and packages, and in the numbers that they report.
"""

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.console import Cell, Console, Table, print_json
from hpctrain.disk import text_of
from hpctrain.errors import ConfigError
from hpctrain.report.account.run_account import RunAccount, read
from hpctrain.runs.code import provenance
from hpctrain.runs.state.select import add_dir, select
from hpctrain.runs.sweep_overrides import flat

# Keys that say where a run is and how it is called, not what it does.
_PLACES = ("output_dir", "name")
_MOST_LINES = 40  # of a difference between two working trees


@dataclass(frozen=True)
class _Parting:
    """The first step at which a metric of two runs is not the same number, and both values."""

    metric: str
    step: int
    left: float
    right: float


@dataclass
class _Differences:
    """What differs between two runs."""

    # Both values by dotted key; None where there is no such key.
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)  # sentences about commits and uncommitted changes
    data: list[str] = field(default_factory=list)  # sentences about the data sets
    # The versions of both by package.
    packages: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # the last values of both
    # Where a shared metric first differs, in the order of the steps.
    partings: list[_Parting] = field(default_factory=list)
    shared: int = 0  # steps at which both have reported training metrics
    left_out: list[str] = field(default_factory=list)  # what could not be compared, and why


def differences(left: RunAccount, right: RunAccount) -> _Differences:
    """Compare two runs."""
    found = _Differences()
    found.config = _config(left.config, right.config)
    data = [each.facts.record.data_digest or "unknown" for each in (left, right)]
    if data[0] != data[1]:
        found.data = [f"the data sets have other contents: {data[0]} and {data[1]}"]
    a, b = (each.facts.path / "provenance" for each in (left, right))
    found.code = _code(a, b, found.left_out)
    found.packages = _packages(a, b, found.left_out)
    _metrics(left, right, found)
    return found


def _config(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    a, b = flat(left), flat(right)
    return {
        key: (a.get(key), b.get(key))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) and key not in _PLACES
    }


def _code(left: Path, right: Path, left_out: list[str]) -> list[str]:
    trees = [
        {Path(each.path).name: each for each in provenance.trees(folder)}
        for folder in (left, right)
    ]
    if not all(trees):
        left_out.append("code: a run has no record of its commit (no git, or it has not begun)")
        return []
    found = []
    for name in sorted({*trees[0], *trees[1]}):
        a, b = (each.get(name) for each in trees)
        if a is None or b is None:
            found.append(f"{name}: only one of the runs used this working tree")
            continue
        if a.commit != b.commit:
            commits = (f"{each.commit[:10]} ({each.branch})" for each in (a, b))
            found.append(f"{name}: commit {' and '.join(commits)}")
        changes = [text_of(folder / f"{name}.diff") for folder in (left, right)]
        if changes[0] != changes[1]:
            found.append(f"{name}: the changes that are not committed differ")
            found += _lines(*changes)
    return found


def _lines(left: str, right: str) -> list[str]:
    lines = difflib.unified_diff(left.splitlines(), right.splitlines(), lineterm="", n=0)
    some = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = [f"... {len(some) - _MOST_LINES} more lines"] if len(some) > _MOST_LINES else []
    return [f"  {line}" for line in some[:_MOST_LINES]] + more


def _packages(
    left: Path, right: Path, left_out: list[str]
) -> dict[str, tuple[str | None, str | None]]:
    a, b = (_versions(text_of(folder / "packages.txt")) for folder in (left, right))
    if not (a and b):
        left_out.append("packages: a run has no record of them (it has not begun)")
        return {}
    names = sorted({*a, *b})
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _versions(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if line.startswith("# Python "):
            found["Python"] = line.split()[2]
        elif "==" in line:
            name, _, version = line.partition("==")
            found[name] = version
    return found


def _metrics(left: RunAccount, right: RunAccount, found: _Differences) -> None:
    a, b = left.history.metrics, right.history.metrics
    names = sorted(name for name in {*a} & {*b} if not name.startswith("perf/"))
    steps: set[int] = set()
    for name in names:
        found.metrics[name] = (a[name].last(), b[name].last())
        values = dict(zip(b[name].steps, b[name].values, strict=True))
        for step, value in zip(a[name].steps, a[name].values, strict=True):
            if step not in values:
                continue
            steps.add(step)
            other = values[step]
            if value != other and not (math.isnan(value) and math.isnan(other)):
                found.partings.append(_Parting(name, step, value, other))
                break
    found.shared = len(steps)
    # At one step the loss says more than what follows from it.
    found.partings.sort(key=lambda each: (each.step, each.metric != "train/loss", each.metric))
    if not steps:
        found.left_out.append(
            "metrics: the runs report none at the same step (train.log_every, train.eval_every)"
        )


def main(argv: Sequence[str]) -> int:
    """Print what differs between two runs; return the exit code."""
    options = _parse(argv)
    paths = select(options.dir, options.runs)
    if len(paths) != 2:
        names = ", ".join(path.name for path in paths[:5]) + ", ..." * (len(paths) > 5)
        raise ConfigError(f"--compare {' '.join(options.runs)}: it takes two runs, and got {names}")
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


def _show(left: RunAccount, right: RunAccount, found: _Differences) -> None:
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


def _parting(found: _Differences) -> str:
    if found.partings:
        first = found.partings[0]
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
        prog="python -m hpctrain report --compare",
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
