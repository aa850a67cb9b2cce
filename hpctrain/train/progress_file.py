"""The run's pulse for those who look from elsewhere: `progress.json` in its directory.

A thread of its own writes it, so that a slow file system never holds up a step; the step itself
only stores a number.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path

from hpctrain.disk import write_atomically
from hpctrain.train.display import Display

log = logging.getLogger(__name__)
EVERY_S = 5.0
_WINDOW = 60  # beats that the speed is measured over: evaluation and saving count as well


class Beat:
    """A display that also writes down where the run is.

    Args:
        display: shows it here.
        file: `progress.json`; readers see the old content or the new.
        metric: the one that people watch.
    """

    def __init__(self, display: Display, file: Path, metric: str) -> None:
        self._display, self._file, self._metric = display, file, metric
        self._metrics: dict[str, float] = {}
        self._beats: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-beat", daemon=True)

    def start(self, step: int, max_steps: int) -> None:
        """Begin at `step` of `max_steps`."""
        self._step, self._max = step, max_steps
        self._stepped = time.time()
        self._display.start(step, max_steps)
        self._thread.start()

    def advance(self, step: int) -> None:
        """One more step is done."""
        self._step = step
        self._display.advance(step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of the last interval."""
        self._metrics = self._metrics | metrics  # a new one: the thread may read the old
        self._display.report(step, metrics)

    def close(self) -> None:
        """Write the last step and leave the terminal as it was."""
        self._over.set()
        self._thread.join()
        self._display.close()

    def _run(self) -> None:
        over = False
        while True:
            try:
                # Not synced: after a crash of the machine nobody misses it.
                write_atomically(self._file, json.dumps(self._content()) + "\n", sync=False)
            except OSError as error:
                log.warning("%s: not written (%s)", self._file, error.strerror)
            if over:
                return
            over = self._over.wait(EVERY_S)

    def _content(self) -> dict[str, object]:
        step, now = self._step, time.time()
        if not self._beats or step != self._beats[-1][1]:
            self._stepped = now
        self._beats.append((now, step))
        since, first = self._beats[0]
        return {
            "step": step,
            "max_steps": self._max,
            "time": now,
            "stepped": self._stepped,  # when the step was last seen to change
            "steps_per_s": (step - first) / (now - since) if step > first else None,
            "metric": self._metric,
            "metrics": self._metrics,
        }
