"""The progress that a training shows: a bar on a terminal, plain lines in a batch log.

    val acc 0.9791  loss 0.003811  val loss 0.09319  lr 3e-05  32,134 samples/s  data wait 1%

The main metric (the config key `metric`) comes first, and what does not fit is left out from the
end.
"""

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from hpctrain.config.metric_registry import EPOCH

log = logging.getLogger(__name__)
_OTHERS = 26  # characters of a line beside the numbers of steps and the metrics
_SHOWN = ("train/loss", "val/loss", "val/accuracy", "train/lr")
_GAP, _MOST = "  ", 5
_SHORT = {"accuracy": "acc", "bits_per_byte": "bpb", "perplexity": "ppl"}


class Display:
    """Shows the progress of a run; this one, of ranks other than 0, shows nothing."""

    def start(self, step: int, max_steps: int) -> None:
        """Show that the run is at `step` of `max_steps`."""

    def advance(self, step: int) -> None:
        """Show that `step` steps are done."""

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of the last report."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which no step is made, because of `what`."""
        return nullcontext()

    def close(self) -> None:
        """Restore the terminal."""


class Lines(Display):
    """One log line per report, the main metric first, with the time that is left."""

    extra: ClassVar[Mapping[str, object]] = {}  # attributes of the log records

    def __init__(self, metric: str = "") -> None:
        self._metric = metric

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        self._first, self._max, self._started = step, max_steps, time.monotonic()

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        rate = (time.monotonic() - self._started) / max(1, step - self._first)
        left = time.strftime("%H:%M:%S", time.gmtime(rate * (self._max - step)))
        values = step, self._max, _GAP.join(describe(metrics, self._metric)), left
        log.info("step %d/%d  %s  ETA %s", *values, extra=self.extra)


class _Bar(Lines):
    """A rich progress bar on standard error; the lines go only to the log file of the run."""

    extra: ClassVar[Mapping[str, object]] = {"on_bar": True}

    def start(self, step: int, max_steps: int) -> None:
        # Without a terminal none of these are needed.
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        from hpctrain.base.terminal.console import Console

        super().start(step, max_steps)
        console = Console(stderr=True)
        self._room = console.width - _OTHERS - 2 * len(str(max_steps))
        fixed = Column(no_wrap=True)
        self._progress = Progress(
            BarColumn(bar_width=8, table_column=fixed),
            MofNCompleteColumn(table_column=fixed),
            TextColumn("ETA", table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            TextColumn("{task.fields[note]}", markup=False, table_column=fixed),
            console=console,
        )
        self._task = self._progress.add_task("training", total=max_steps, completed=step, note="")
        self._note: dict[str, float] = {}
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        super().report(step, metrics)
        self._note |= metrics
        note = ""
        for part in describe(self._note, self._metric):  # none is cut, but the last are left out
            longer = f"{note}{_GAP}{part}" if note else part
            note = longer if len(longer) <= self._room else note
        self._progress.update(self._task, note=note)

    def close(self) -> None:
        self._progress.stop()


def describe(metrics: Mapping[str, float], metric: str = "") -> list[str]:
    """Return the most important metrics by name, each as a short text, the main metric first."""
    shown = [name for name in dict.fromkeys((metric, *_SHOWN)) if name in metrics]
    if not shown:  # a loop of one's own has names of its own
        shown = [
            name for name in metrics if not name.startswith(("perf/", "best/")) and name != EPOCH
        ]
    parts = [f"{_label(name)} {metrics[name]:.4g}" for name in shown[:_MOST]]
    if rate := metrics.get("perf/samples_per_s"):
        parts.append(f"{rate:,.0f} samples/s")
    if (wait := metrics.get("perf/data_wait_fraction")) is not None:
        parts.append(f"data wait {wait:.0%}")
    return parts


def _label(name: str) -> str:
    """Return a short label: `loss` for train/loss, `val acc` for val/accuracy."""
    group, _, rest = name.partition("/")
    label = _SHORT.get(rest, rest)
    return label if group == "train" else f"{group} {label}"


def choose_display(is_main: bool, metric: str = "") -> Display:
    """Return the bar on a terminal, lines elsewhere, and nothing on ranks other than 0."""
    if not is_main:
        return Display()
    return _Bar(metric) if sys.stderr.isatty() else Lines(metric)
