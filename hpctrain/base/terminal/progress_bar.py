"""The progress of a command on stderr: one line that is renewed on a terminal, or some lines."""

import sys
import time
from typing import Self

EVERY_S = 10.0  # between two lines
_RENEWED_S = 0.2
_LONG_S = 600.0  # the time that is left is said in minutes from here on


class ProgressBar:
    """Counts samples, or what `noun` says, and bytes, and shows them.

    Of `samples`, None means not known, and of `nbytes`, roughly those of all data, 0. After
    `first_s` seconds (None: `EVERY_S`) the first line estimates the time.
    """

    def __init__(
        self,
        samples: int | None,
        nbytes: int,
        *,
        label: str = "",
        noun: str = "samples",
        quiet: bool = False,
        first_s: float | None = None,
    ) -> None:
        self._samples, self._bytes, self._label, self._noun = samples, nbytes, label, noun
        self.samples = self.bytes = 0
        self._quiet, self._renews = quiet, sys.stderr.isatty()
        self._every = _RENEWED_S if self._renews else EVERY_S
        self._start = time.monotonic()
        self._next = self._start + (EVERY_S if first_s is None else first_s) * (not self._renews)

    def advance(self, samples: int, nbytes: int) -> None:
        """Add to the number of samples and bytes that are done."""
        self.samples += samples
        self.bytes += nbytes
        if not self._quiet and (now := time.monotonic()) >= self._next:
            self._next = now + self._every
            self._show(self._text(max(now - self._start, 1e-6)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._renews and not self._quiet:
            self._show(f"{self._text(max(time.monotonic() - self._start, 1e-6))}\n")

    def _show(self, text: str) -> None:
        stream = getattr(sys.stderr, "unguarded", sys.stderr)  # our own control characters
        stream.write(f"\r\x1b[K{text}" if self._renews else f"{text}\n")
        stream.flush()

    def _text(self, took: float) -> str:
        total = "" if self._samples is None else f"/{self._samples}"
        rate = self.samples / took
        shown = f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.2g}"
        parts = [f"{self._label}{self.samples}{total} {self._noun}", f"{shown} {self._noun}/s"]
        if self.bytes:
            parts.insert(1, f"{self.bytes / 1e6:,.1f} MB")
            parts.append(f"{self.bytes / took / 1e6:,.0f} MB/s")
        known = self._samples is not None
        done, whole = (self.samples, self._samples) if known else (self.bytes, self._bytes)
        if done and whole:
            left = max(0.0, (whole - done) * took / done)
            parts.append(f"{left:.0f} s left" if left < _LONG_S else f"{left / 60:,.0f} min left")
        return ", ".join(parts)
