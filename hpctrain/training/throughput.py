"""How fast a run trains: samples per second, and the share of time that the step waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.data.feed import Feed
from hpctrain.training.slow_ranks import SlowRanks, worked_s


class Throughput:
    """Measures training between two reports.

    Time inside `paused` does not count, so that evaluation and checkpoints do not lower the figure.

    Args:
        loader: The feed whose waiting time is read.
        step: Global step at which the measurement begins.
        global_batch_size: Samples per step, over all ranks.
        slow_ranks: Compares the work of the ranks at each report.
    """

    def __init__(
        self, loader: Feed, step: int, global_batch_size: int, slow_ranks: SlowRanks
    ) -> None:
        self.loader, self.global_batch_size = loader, global_batch_size
        self._slow_ranks = slow_ranks
        self._restart(step)

    def _restart(self, step: int) -> None:
        self._started, self._waited_s, self._step = time.monotonic(), self.loader.wait_s, step
        self._worked_s = worked_s()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        began, worked = time.monotonic(), worked_s()
        yield
        self._started += time.monotonic() - began
        self._worked_s += worked_s() - worked

    def metrics(self, step: int) -> dict[str, float]:
        """Return the figures since the last call, and start anew at global step `step`.

        Every rank calls this at the same steps.
        """
        elapsed = max(time.monotonic() - self._started, 1e-9)
        waited = self.loader.wait_s - self._waited_s
        self._slow_ranks.compare(elapsed, worked_s() - self._worked_s, waited)
        metrics = {
            "perf/samples_per_s": (step - self._step) * self.global_batch_size / elapsed,
            "perf/data_wait_fraction": waited / elapsed,
        }
        self._restart(step)
        return metrics
