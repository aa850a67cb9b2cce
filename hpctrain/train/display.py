"""What people see while it runs: a bar on a terminal, plain lines in a batch log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows the run's progress."""

    def start(self, step: int, max_steps: int) -> None:
        """Begin at `step` of `max_steps`."""

    def advance(self, step: int) -> None:
        """One more step is done."""

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of the last interval."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class NoDisplay:
    """For the ranks other than 0."""

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        pass

    def advance(self, step: int) -> None:  # noqa: D102
        pass

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass


class Lines(NoDisplay):
    """One log line a report, with the time that is left."""

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        self._first, self._max, self._started = step, max_steps, time.monotonic()

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        rate = (time.monotonic() - self._started) / max(1, step - self._first)
        left = time.strftime("%H:%M:%S", time.gmtime(rate * (self._max - step)))
        log.info("step %d/%d  %s  ETA %s", step, self._max, describe(metrics), left)


class Bar(NoDisplay):
    """A rich progress bar on standard error."""

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            # Last, and cut off where the terminal ends.
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("training", total=max_steps, completed=step, note="")
        self._note: dict[str, float] = {}
        self._progress.start()

    def advance(self, step: int) -> None:  # noqa: D102
        self._progress.update(self._task, completed=step)

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        self._note |= metrics
        self._progress.update(self._task, note=describe(self._note))

    def close(self) -> None:  # noqa: D102
        self._progress.stop()


def describe(metrics: dict[str, float]) -> str:
    """The few metrics that people watch, in one line."""
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
    """The bar on a terminal, lines elsewhere, nothing on the other ranks."""
    if not is_main:
        return NoDisplay()
    return Bar() if sys.stderr.isatty() else Lines()
