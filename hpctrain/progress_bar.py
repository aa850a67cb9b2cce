"""The progress of a command: a bar on a terminal, or otherwise a line from time to time."""

import sys
import time
from typing import Any, Self

EVERY_S = 10.0  # between two lines
_LONG_S = 600.0  # the time that is left is said in minutes from here on


class Progress:
    """Counts samples and bytes and shows them on stderr.

    Of `samples`, None means not known, and of `nbytes`, roughly those of all data, 0. After
    `first_s` seconds (None: `EVERY_S`) the first line estimates the time.
    """

    def __init__(
        self,
        samples: int | None,
        nbytes: int,
        *,
        label: str = "",
        quiet: bool = False,
        first_s: float | None = None,
    ) -> None:
        self._samples, self._bytes, self._label = samples, nbytes, label
        self.samples = self.bytes = 0
        self._start = time.monotonic()
        self._next = self._start + (EVERY_S if first_s is None else first_s)
        self._bar: Any = None
        self._quiet = quiet

    def advance(self, samples: int, nbytes: int) -> None:
        """Add to the number of samples and bytes that are done."""
        self.samples += samples
        self.bytes += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done(), what=self._what())
        elif not self._quiet and (now := time.monotonic()) >= self._next:
            self._next = now + EVERY_S
            print(f"{self._what()}{self._left()}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.progress import TimeRemainingColumn as Remaining

            from hpctrain.console import Console

            columns = (BarColumn(), TextColumn("{task.fields[what]}", markup=False), Remaining())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=self._total() or None, what="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def _done(self) -> int:
        return self.samples if self._samples is not None else self.bytes

    def _total(self) -> int:
        return self._samples if self._samples is not None else self._bytes

    def _what(self) -> str:
        took = max(time.monotonic() - self._start, 1e-6)
        total = f"/{self._samples}" if self._samples is not None else ""
        parts = [f"{self._label}{self.samples}{total} samples", _rate(self.samples / took)]
        if self.bytes:
            parts.insert(1, f"{self.bytes / 1e6:,.1f} MB")
            parts.append(f"{self.bytes / took / 1e6:,.0f} MB/s")
        return ", ".join(parts)

    def _left(self) -> str:
        done, total = self._done(), self._total()
        if not total or not done:
            return ""
        took = time.monotonic() - self._start
        left = max(0.0, (total - done) * took / done)
        return f", {left:.0f} s left" if left < _LONG_S else f", {left / 60:,.0f} min left"


def _rate(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 or not rate else f"{rate:.2g} samples/s"
