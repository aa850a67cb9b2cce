"""What `python -m hpctrain --help GROUP/` says: what a run measures, with units and meanings."""

import difflib
import sys
from collections.abc import Sequence

from hpctrain.config.metric_registry import Metric, registered
from hpctrain.errors import ConfigError


def show(names: Sequence[str]) -> None:
    """Print the named metrics, or those of `perf/`, or all: a table, or into a file by line.

    Words in capitals stand for names and numbers that differ from run to run.
    """
    chosen = _select([] if [*names] == ["metrics"] else [name.rstrip("/") for name in names])
    if sys.stdout.isatty():
        _print_table(chosen)
    else:
        for metric in chosen:
            print("\t".join(metric))


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

    table = Table("metric", "unit", "meaning")
    for metric in chosen:
        table.add_row(*metric)
    Console().print(table)
