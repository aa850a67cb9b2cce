"""The progress that a training shows: a bar on a terminal, plain lines in a batch log.

    val acc 0.9791  loss 0.003811  val loss 0.09319  lr 3e-05  32,134 samples/s  data wait 1%

`progress.json` has it, too: `hpctrain status` reads it, and it is the heartbeat of the run. A
thread writes it every few seconds, so that a slow file system never delays a step.

The main metric (the config key `metric`) comes first, and what does not fit is left out from the
end.
"""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.names.metric_names import better
from hpctrain.base.names.run_record import Progress
from hpctrain.config.metric_registry import EPOCH
from hpctrain.engine.parts.improvement import Improvement

log = logging.getLogger(__name__)
EVERY_S = 5.0
_WINDOW = 60  # writes over which the speed is measured; evaluation and saving count as well
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


def choose_display(metric: str = "") -> Display:
    """Return the bar on a terminal, and lines elsewhere."""
    return _Bar(metric) if sys.stderr.isatty() else Lines(metric)


class ProgressFile(Display):
    """A display that also writes the step and the metrics to a file.

    Readers of `progress.json` see the old content or the new, never a mixture. `metric` is the one
    that `hpctrain status` shows, and whose best value is kept.
    """

    def __init__(self, display: Display, file: Path, metric: str) -> None:
        self._display, self._file, self._metric = display, file, metric
        self._metrics: dict[str, float] = {}
        self._followed = Improvement(metric if better(metric) else None)
        self._best: dict[str, float] | None = None  # a new dict each time: the thread may read it
        self._samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        # The longest step, the longest save, both in the attempts before; and since the last step.
        self._step_s = self._save_s = self._stop_s = self._paused_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)

    def start(self, step: int, max_steps: int) -> None:
        """Show and write that the run is at `step` of `max_steps`."""
        self._step = self._first = step
        self._max, self._doing = max_steps, ""
        self._stepped = self._first_stepped = time.time()
        self._longest_s = 0.0
        self._go_on_with_best(step)
        self._display.start(step, max_steps)
        self._thread.start()

    def advance(self, step: int) -> None:
        """Note that `step` steps are done."""
        now = time.time()
        took, self._paused_s = now - self._stepped - self._paused_s, 0.0
        # The first step of an attempt also compiles the model and waits for the first batch.
        if self._step == self._first:
            self._first_stepped = now
        else:
            self._longest_s = max(self._longest_s, now - self._stepped)
            self._step_s = max(self._step_s, took)
        self._step, self._stepped = step, now
        self._display.advance(step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of the last report, and write them from now on."""
        self._metrics = self._metrics | metrics  # a new dict: the thread may be reading the old
        if self._followed.judge(metrics, step):
            self._best = {"value": metrics[self._metric], "step": step}
        self._display.report(step, metrics)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Note that no step is made during the context, because of `what`."""
        self._doing, began = what, time.time()
        try:
            with self._display.doing(what):
                yield
        finally:
            took = time.time() - began
            self._paused_s += took
            if what == "a checkpoint":
                self._save_s = max(self._save_s, took)
            self._doing = ""

    def close(self) -> None:
        """Write the last step, end the thread and restore the terminal."""
        self._over.set()
        self._thread.join()
        self._display.close()

    def _go_on_with_best(self, step: int) -> None:
        """Keep the best value of the attempts before, unless its step is made again."""
        with suppress(DamageError):
            before = Progress.of(self._file.parent)
            self._stop_s = before.stop_s
            if before.best and before.metric == self._metric and before.best.step <= step:
                self._followed.value = before.best.value
                self._best = {"value": before.best.value, "step": before.best.step}

    def _run(self) -> None:
        over = False
        while True:
            try:
                # Not synced to the disk: after a crash of the machine the file is of no use.
                write_atomically(self._file, json.dumps(self._content()) + "\n", sync=False)
            except OSError as error:
                log.warning("%s: not written (%s)", self._file, error.strerror)
            if over:
                return
            over = self._over.wait(EVERY_S)

    def _content(self) -> dict[str, object]:
        step, now = self._step, time.time()
        self._samples.append((now, step))
        since, first = self._samples[0]
        after_first = max(0, step - self._first - 1)
        return {
            "version": Progress.VERSION,
            "step": step,
            "max_steps": self._max,
            "time": now,
            "stepped": self._stepped,  # time at which the step last changed
            # Between two steps of this attempt, evaluations and checkpoints included.
            "step_s": (self._stepped - self._first_stepped) / after_first if after_first else None,
            "longest_step_s": self._longest_s,
            # What a stop takes; that of the attempts before until this one has saved.
            "stop_s": self._step_s + self._save_s if self._save_s else self._stop_s,
            "doing": self._doing,
            "steps_per_s": (step - first) / (now - since) if step > first else None,
            "metric": self._metric,
            "better": better(self._metric),
            "metrics": self._metrics,
            "best": self._best,  # of the metric, with its step; None while there is none
        }
