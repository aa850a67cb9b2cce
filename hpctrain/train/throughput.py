"""How fast a run trains: samples per second, and the share of time that the step waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.data.feed import Feed


class Throughput:
    """Measures training between two reports.

    Time inside `paused` does not count, so that evaluation and checkpoints do not lower the figure.

    Args:
        loader: The feed whose waiting time is read.
        step: Global step at which the measurement begins.
        global_batch_size: Samples per step, over all ranks.
    """

    def __init__(self, loader: Feed, step: int, global_batch_size: int) -> None:
        self.loader, self.global_batch_size = loader, global_batch_size
        self._restart(step)

    def _restart(self, step: int) -> None:
        self._started, self._waited_s, self._step = time.monotonic(), self.loader.wait_s, step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        began = time.monotonic()
        yield
        self._started += time.monotonic() - began

    def metrics(self, step: int) -> dict[str, float]:
        """Return the figures since the last call, and start anew at global step `step`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        metrics = {
            "perf/samples_per_s": (step - self._step) * self.global_batch_size / elapsed,
            "perf/data_wait_fraction": (self.loader.wait_s - self._waited_s) / elapsed,
        }
        self._restart(step)
        return metrics
