"""The progress that a training shows: a bar on a terminal, plain lines in a batch log.

    val acc 0.9791  loss 0.003811  val loss 0.09319  lr 3e-05  32,134 samples/s  data wait 1%

The main metric (the config key `metric`) comes first, and what does not fit is left out from the
end.
"""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
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

from hpctrain.console import Console as GuardedConsole

log = logging.getLogger(__name__)
# Characters of a terminal that has room for the time that has passed, and for a long bar.
_MEDIUM, _WIDE = 80, 110
_SHOWN = ("train/loss", "val/loss", "val/accuracy", "train/lr")
_GAP = "  "
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


class _Parts:
    """As many texts as fit into the line; none is cut, which rich marks with a special letter."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            longer = f"{line}{_GAP}{part}" if line else part
            if len(longer) > options.max_width:
                break
            line = longer
        yield Text(line, no_wrap=True, end="")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, len(_GAP.join(self._parts)))).with_maximum(options.max_width)


class _NoteColumn(ProgressColumn):
    """The metrics: the only column that is shortened where the terminal is too narrow."""

    def render(self, task: Task) -> _Parts:
        return _Parts(task.fields["note"])


class Bar(Lines):
    """A rich progress bar on standard error; the lines go only to the log file of the run."""

    extra: ClassVar[Mapping[str, object]] = {"on_bar": True}

    def start(self, step: int, max_steps: int) -> None:  # noqa: D102
        super().start(step, max_steps)
        console = GuardedConsole(stderr=True)
        fixed = Column(no_wrap=True)
        elapsed = [TimeElapsedColumn(table_column=fixed)] if console.width >= _MEDIUM else []
        self._progress = Progress(
            BarColumn(bar_width=20 if console.width >= _WIDE else 8, table_column=fixed),
            MofNCompleteColumn(table_column=fixed),
            *elapsed,
            TextColumn("ETA", table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            _NoteColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=max_steps, completed=step, note=())
        self._note: dict[str, float] = {}
        self._progress.start()

    def advance(self, step: int) -> None:  # noqa: D102
        self._progress.update(self._task, completed=step)

    def report(self, step: int, metrics: dict[str, float]) -> None:  # noqa: D102
        super().report(step, metrics)
        self._note |= metrics
        self._progress.update(self._task, note=describe(self._note, self._metric))

    def close(self) -> None:  # noqa: D102
        self._progress.stop()


def describe(metrics: Mapping[str, float], metric: str = "") -> list[str]:
    """Return the most important metrics by name, each as a short text, the main metric first."""
    shown = [name for name in dict.fromkeys((metric, *_SHOWN)) if name in metrics]
    parts = [f"{_label(name)} {metrics[name]:.4g}" for name in shown]
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
    return Bar(metric) if sys.stderr.isatty() else Lines(metric)
