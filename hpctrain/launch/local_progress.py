"""The progress of runs on this machine: a bar over the runs on a terminal, plain lines elsewhere.

1 of 4 starts: digits-5f764f66 lr=0.001 seed=0
1 of 4 is finished after 0:00:12: digits-5f764f66 lr=0.001 seed=0, val/accuracy 0.9712
running ━━━╸━━━━━━ 1/4 0:00:31 digits-fe650090 lr=0.001 seed=1: step 220/660
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpctrain.console import Cell, Console
from hpctrain.errors import DamageError
from hpctrain.launch.arrays import Entry
from hpctrain.launch.output import NoteColumn, say
from hpctrain.run_record import Progress as Reached
from hpctrain.runs.sweep_overrides import label


class LocalProgress:
    """Shows runs that run one after the other."""

    def __init__(self, count: int) -> None:
        self._count, self._begun = count, 0
        self._progress = Progress(
            TextColumn("running"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            NoteColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=count, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, entry: Entry) -> None:
        """Show that a run starts."""
        self._begun += 1
        self._since = time.monotonic()
        if self._progress.disable:
            say(f"{self._begun} of {self._count} starts: {_name(entry)}")
        self.look(entry)

    def look(self, entry: Entry) -> None:
        """Show how far the run is."""
        if not self._progress.disable:
            note = f"{_name(entry)}{reached(entry.run.path)}"
            self._progress.update(self._task, completed=self._begun - 1, note=note, refresh=True)

    def end(self, entry: Entry) -> None:
        """Show how the run has ended: `entry.state`."""
        took, value = timedelta(seconds=round(time.monotonic() - self._since)), entry.metric()
        metric = "" if value is None else f", {entry.config.metric} {value:.4g}"
        line = f"{self._begun} of {self._count} is {entry.state} after {took}: {_name(entry)}"
        if self._progress.disable:
            say(f"{line}{metric}")
        else:
            self._progress.console.print(Cell(f"{line}{metric}"))
            self._progress.update(self._task, completed=self._begun, note="")


def _name(entry: Entry) -> str:
    return f"{entry.run.name} {label(entry.swept)}".rstrip()


def reached(run: Path) -> str:
    """Return the step and the main metric of a run as `: step 220/660, val/accuracy 0.97`.

    It is "" before the first step.
    """
    try:
        found = Reached.of(run)
    except DamageError:
        return ""
    if found.step is None:
        return ""
    value = found.metrics.get(found.metric)
    text = f": step {found.step}/{found.max_steps}"
    return text if value is None else f"{text}, {found.metric} {value:.4g}"
