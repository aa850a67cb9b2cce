"""What a sweep prints: one line a run, as many as a screen holds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from rich.text import Text

from hpctrain.launch.arrays import Entry
from hpctrain.secrets import mask

ROWS = 40
T = TypeVar("T")


def say(text: str, style: str = "") -> None:
    """A line for people, on standard error."""
    Console(stderr=True, soft_wrap=True).print(Text(text, style))


def runs(count: int) -> str:
    """`1 run`, `2 runs`."""
    return f"{count:,} run" + ("s" if count != 1 else "")


def progress(asked: Sequence[T]) -> Iterable[T]:
    """The runs, with a bar on a terminal when there are many."""
    hidden = len(asked) <= ROWS or not sys.stderr.isatty()
    console = Console(stderr=True)
    return track(asked, "checking", console=console, disable=hidden, transient=True)


def show(entries: list[Entry]) -> None:
    """Print the runs, what differs between them, their states and, once known, their metrics."""
    metrics = [entry.metric() for entry in entries]
    names = dict.fromkeys(
        entry.config.metric
        for entry, value in zip(entries, metrics, strict=True)
        if value is not None
    )
    # A name is there to be copied: where there is no room, the overrides are folded.
    run, state, job = (Column(title, no_wrap=True) for title in ("run", "state", "job"))
    table = Table(run, Column("overrides", overflow="fold"), state, job, *names)
    common = set.intersection(*(set(entry.overrides) for entry in entries))
    for entry, metric in list(zip(entries, metrics, strict=True))[:ROWS]:
        own = [text for text in entry.overrides if text not in common or len(entries) == 1]
        # Text, for an override may look like rich's markup.
        cells = [entry.run.name, mask(" ".join(own)), entry.state, entry.job]
        for name in names:
            mine = name == entry.config.metric and metric is not None
            cells.append(f"{metric:.4f}" if mine else "")
        table.add_row(*map(Text, cells))
    Console(stderr=True, soft_wrap=True).print(table)
    if len(entries) > ROWS:
        counts = Counter(entry.state.split(",")[0] or "checked" for entry in entries)
        listed = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        say(f"… and {len(entries) - ROWS:,} more; of all {len(entries):,}: {listed}")
