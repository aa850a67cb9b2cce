"""The progress that a training shows: a bar on a terminal, plain lines in a batch log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

log = logging.getLogger(__name__)
_WIDE = 110  # characters of a terminal that has room for a long bar and all metrics


class Display(Protocol):
    """Shows the progress of a run."""

    def start(self, step: int, max_steps: int) -> None:
        """Show that the run is at `step` of `max_steps`."""

    def advance(self, step: int) -> None:
        """Show that `step` steps are done."""

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of the last report."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which no step is made, because of `what`."""

    def close(self) -> None:
        """Restore the terminal."""


class NoDisplay:
    """The display of ranks other than 0: it shows nothing."""

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        pass

    def advance(self, step: int) -> None:  # noqa: D102
        pass

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        pass

    def doing(self, what: str) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()

    def close(self) -> None:  # noqa: D102
        pass


class Lines(NoDisplay):
    """One log line per report, with the time that is left."""

    extra: ClassVar[Mapping[str, object]] = {}  # attributes of the log records

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        self._first, self._max, self._started = step, max_steps, time.monotonic()

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        rate = (time.monotonic() - self._started) / max(1, step - self._first)
        left = time.strftime("%H:%M:%S", time.gmtime(rate * (self._max - step)))
        values = step, self._max, describe(metrics), left
        log.info("step %d/%d  %s  ETA %s", *values, extra=self.extra)


class _NoteColumn(ProgressColumn):
    """The metrics: the only column that is cut where the terminal is too narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


class Bar(Lines):
    """A rich progress bar on standard error; the lines go only to the log file of the run."""

    extra: ClassVar[Mapping[str, object]] = {"on_bar": True}

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        super().start(step, max_steps)
        console = Console(stderr=True)
        fixed = Column(no_wrap=True)
        self._progress = Progress(
            BarColumn(bar_width=20 if console.width >= _WIDE else 8, table_column=fixed),
            MofNCompleteColumn(table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            TextColumn("ETA", table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            _NoteColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=max_steps, completed=step, note="")
        self._note: dict[str, float] = {}
        self._progress.start()

    def advance(self, step: int) -> None:  # noqa: D102
        self._progress.update(self._task, completed=step)

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        super().report(step, metrics)
        self._note |= metrics
        self._progress.update(self._task, note=describe(self._note))

    def close(self) -> None:  # noqa: D102
        self._progress.stop()


def describe(metrics: dict[str, float]) -> str:
    """Return the most important metrics as one line."""
    shown = {
        "loss": "train/loss",
        "val loss": "val/loss",
        "val accuracy": "val/accuracy",
        "lr": "train/lr",
    }
    parts = [f"{label} {metrics[key]:.4g}" for label, key in shown.items() if key in metrics]
    if rate := metrics.get("perf/samples_per_s"):
        parts.append(f"{rate:,.0f} samples/s")
    if (wait := metrics.get("perf/data_wait_fraction")) is not None:
        parts.append(f"data wait {wait:.0%}")
    return "  ".join(parts)


def choose_display(is_main: bool) -> Display:
    """Return the bar on a terminal, lines elsewhere, and nothing on ranks other than 0."""
    if not is_main:
        return NoDisplay()
    return Bar() if sys.stderr.isatty() else Lines()
