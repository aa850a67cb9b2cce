"""`python -m hpctrain metrics [GROUP|NAME...]`: what a run measures, with units and meanings."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from hpctrain.config.metric_registry import Metric, registered
from hpctrain.errors import ConfigError


def main(argv: list[str]) -> int:
    """Print the named metrics, or all of them: as a table on a terminal, otherwise by line."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain metrics",
        description="Print every metric that a run may have, with its unit and meaning. Words in "
        "capitals stand for names and numbers that differ. Into a pipe or a file there is one line "
        "per metric, with tabs between metric, unit and meaning.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="GROUP|NAME", help="such as perf or perf/mfu_percent"
    )
    chosen = _select(parser.parse_args(argv).names)
    if sys.stdout.isatty():
        _print_table(chosen)
    else:
        for metric in chosen:
            print("\t".join(metric))
    return 0


def _select(names: Sequence[str]) -> list[Metric]:
    """Return the metrics that have one of the names, or are in a group of that name."""
    known = [metric.name for metric in registered()]
    groups = list(dict.fromkeys(name.partition("/")[0] for name in known))
    for name in names:
        if name not in known and name not in groups:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{name}: no such metric or group; {hint}the groups are {', '.join(groups)}"
            )
    return [
        metric
        for metric in registered()
        if not names or metric.name in names or metric.name.partition("/")[0] in names
    ]


def _print_table(chosen: list[Metric]) -> None:
    from hpctrain.console import Console, Table

    table = Table("metric", "unit", "meaning", spaced=True)
    for metric in chosen:
        table.add_row(*metric)
    Console().print(table)
