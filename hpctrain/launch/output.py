"""The output of a sweep: a table with one row per run, and single lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.progress import track

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.console import Console, Table, say

if TYPE_CHECKING:
    from hpctrain.launch.entry import Entry

ROWS = 40  # longer tables are cut
T = TypeVar("T")


def runs(count: int) -> str:
    """Return the number with its noun: `1 run`, `2 runs`."""
    return f"{count:,} run" + ("s" if count != 1 else "")


def progress(items: Sequence[T]) -> Iterable[T]:
    """Iterate over `items`; show a progress bar if they are many and this is a terminal."""
    hidden = len(items) <= ROWS or not sys.stderr.isatty()
    console = Console(stderr=True)
    return track(items, "checking", console=console, disable=hidden, transient=True)


def show(entries: list[Entry]) -> None:
    """Print a table of the runs: name, overrides that not all have, state, job, and metric."""
    metrics = [entry.metric() for entry in entries]
    names = dict.fromkeys(
        entry.config.metric
        for entry, value in zip(entries, metrics, strict=True)
        if value is not None
    )
    table = Table("run", "overrides", "state", "job", *names)
    common = set.intersection(*(set(entry.overrides) for entry in entries))
    for entry, metric in list(zip(entries, metrics, strict=True))[:ROWS]:
        own = [text for text in entry.overrides if text not in common or len(entries) == 1]
        cells = [entry.run.name, mask(" ".join(own)), entry.state, entry.job]
        for name in names:
            mine = name == entry.config.metric and metric is not None
            cells.append(f"{metric:.4g}" if mine else "")
        table.add_row(*cells)
    Console(stderr=True).print(table)
    if len(entries) > ROWS:
        counts = Counter(entry.state.split(",")[0] or "checked" for entry in entries)
        listed = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        say(f"… and {len(entries) - ROWS:,} more; of all {len(entries):,}: {listed}")
