"""Reading ahead of the consumer of a loader, or only when it asks.

    planning thread    plan of stretch 0 ── plan of stretch 1 ── …
    reading threads       └─ group 0 ── group 1 ── group 2 ── …        futures, in order
    consumer                    └─ batch, batch, … ── batch, batch, …

Batches can be so small that Python's own time for each would exceed that of the copy. So a thread
reads several batches at once, a *group*, into one buffer, and the consumer gets views of it. What
takes long, such as slow transforms, is read in small groups: the groups that have begun when the
consumer stops are read for nothing.
"""

import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, Future

from hpctrain.data.loading.batch_reader import MAX_STEPS, BatchReader
from hpctrain.data.loading.reading_plan import Planner, StepGroup
from hpctrain.data.loading.threads import WhenAsked, pool
from hpctrain.data.shards.types import Batch

GROUP = 2**23  # bytes that a thread reads at once: handing them over takes time, too
_GROUP_WHEN_ASKED = 2**21  # bytes that the consumer reads at once: they stay in a core's cache
_GROUP_S = 0.25  # seconds that the reading of a group of several batches may take


class Prefetcher:
    """Reads the groups of one rank in their order.

    About `prefetch_bytes` are read ahead, at least a group for each thread. Without threads the
    consumer reads each group when it needs it. `wait_s` is how long the consumer has waited.
    """

    def __init__(
        self, planner: Planner, reader: BatchReader, *, threads: int, prefetch_bytes: int
    ) -> None:
        self._planner, self._reader = planner, reader
        self._threads, self._prefetch_bytes = threads, prefetch_bytes
        self._ahead: deque[tuple[StepGroup, Future[deque[Batch]]]] = deque()
        self.wait_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether the next group has been read."""
        return bool(self._ahead and self._ahead[0][1].done())

    def read(self, consumed: int) -> Generator[tuple[StepGroup, deque[Batch]], None, None]:
        """Yield the groups after the state `consumed`, each with the batches of its steps.

        At the end nobody waits for groups that are being read: the consumer may have to save at
        once.
        """
        readers, planning = pool(self._threads), pool(min(1, self._threads))
        groups = self._groups(consumed, planning)
        ahead = self._ahead = deque()
        # The consumer reads the first group itself: it shall not wait for any other work.
        executor: Executor = WhenAsked()
        ending = sys.is_finalizing
        try:
            while True:
                start = time.perf_counter()
                while len(ahead) < self._depth() and (group := next(groups, None)) is not None:
                    ahead.append((group, executor.submit(self._reader.read, group)))
                    executor = readers
                if not ahead:
                    return
                group, future = ahead.popleft()
                batches = future.result()
                self.wait_s += time.perf_counter() - start
                yield group, batches
        finally:  # also when the consumer breaks out of its loop, or drops the iterator
            if not ending():  # then Python has joined the threads and taken its modules apart
                readers.shutdown(wait=False, cancel_futures=True)
                planning.shutdown(wait=False, cancel_futures=True)

    def _groups(self, consumed: int, planning: Executor) -> Iterator[StepGroup]:
        """Cut the steps into groups, small ones at first, so that the first batch is fast."""
        nbytes = GROUP if self._threads else _GROUP_WHEN_ASKED
        limit = 1
        for stretch in self._planner.stretches(consumed, planning):
            first = 0
            while first < len(stretch.consumed):
                most = self._reader.steps_in(nbytes, _GROUP_S)
                group = stretch.part(first, first + min(limit, most))
                if self._planner.in_blocks is not None:
                    self._planner.read_ahead(group, planning)
                yield group
                first, limit = first + len(group.consumed), min(2 * limit, MAX_STEPS)

    def _depth(self) -> int:
        """Return how many groups are read, or wait for the consumer, at a time."""
        if not self._threads:
            return 1
        return max(self._threads + 1, self._prefetch_bytes // max(GROUP, self._reader.batch_bytes))
