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
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any, ParamSpec, TypeVar

import torch

from hpctrain.data.loading.collate import Collate
from hpctrain.data.loading.steps import StepGroup, StepPlan, Steps, Stretch
from hpctrain.data.samplers.order import Sampler
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Batch, Int64s
from hpctrain.data.source import Source, new_arrays
from hpctrain.data.workers.pool import Workers

MAX_STEPS = 64  # of a group


class BatchReader:
    """Reads groups; `batch_bytes` is that of the largest batch so far, where lengths vary."""

    def __init__(
        self, source: Source, share: int, collate: Collate, *, workers: Workers | None, seed: int
    ) -> None:
        self._source, self._collate = source, collate
        self._workers, self._seed = workers, seed
        fixed = [field.nbytes for field in source.fields.values() if not field.variable]
        self._varies = len(fixed) < len(source.fields)
        self.batch_bytes = share * sum(fixed)
        self.batch_s: float | None = None

    def steps_in(self, nbytes: int, seconds: float) -> int:
        """Return how many steps make about `nbytes`, and take at most `seconds`: 1 to MAX_STEPS."""
        if self.batch_s is None:
            return 1
        most = min(nbytes // max(1, self.batch_bytes), int(seconds / max(1e-9, self.batch_s)))
        return min(MAX_STEPS, max(1, most))

    def read(self, group: StepGroup) -> deque[Batch]:
        """Return one batch for each step of the group."""
        began = time.monotonic()
        positions, samples, mask = group.plan
        rows: Mapping[str, Array | Ragged]
        if self._workers is not None:
            seed = (self._seed, group.epoch)
            rows = self._workers.submit(seed, positions.reshape(-1), samples.reshape(-1)).result()
        else:
            room = new_arrays(self._source.fields, samples.size, self._collate.buffers.take)
            rows = self._source.read(samples.reshape(-1), room)
        batches = self._collate(rows, mask)
        if self._varies:
            nbytes = max(sum(value.nbytes for value in batch.values()) for batch in batches)
            self.batch_bytes = max(self.batch_bytes, nbytes)
        self.batch_s = (time.monotonic() - began) / len(batches)
        return batches


P = ParamSpec("P")
T = TypeVar("T")

GROUP = 2**23  # bytes that a thread reads at once: handing them over takes time, too
_GROUP_WHEN_ASKED = 2**21  # bytes that the consumer reads at once: they stay in a core's cache
_GROUP_S = 0.25  # seconds that the reading of a group of several batches may take


class Prefetcher:
    """Plans and reads the groups of one rank in their order, and tells the source what comes.

    About `prefetch_bytes` are read ahead, at least a group for each thread. Without threads the
    consumer reads each group when it needs it. `wait_s` is how long the consumer has waited.
    """

    def __init__(
        self,
        steps: Steps,
        sampler: Sampler,
        source: Source,
        reader: BatchReader,
        *,
        threads: int,
        prefetch_bytes: int,
    ) -> None:
        self._steps, self._sampler, self._source, self._reader = steps, sampler, source, reader
        self._blocks = getattr(sampler, "blocks", None)  # of one that goes through them in order
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
        readers, planning = _pool(self._threads), _pool(min(1, self._threads))
        groups = self._groups(consumed, planning)
        ahead = self._ahead = deque()
        # The consumer reads the first group itself: it shall not wait for any other work.
        executor: Executor = _WhenAsked()
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
        planned = (self._planned(each, planning) for each in self._steps.stretches(consumed))
        stretch = next(planned, None)
        while stretch is not None:
            following = next(planned, None)  # which `planning` plans meanwhile
            first = 0
            while first < len(stretch.consumed):
                most = self._reader.steps_in(nbytes, _GROUP_S)
                group = stretch.part(first, first + min(limit, most))
                if self._blocks is not None:
                    planning.submit(self._read_ahead, self._blocks, group)
                yield group
                first, limit = first + len(group.consumed), min(2 * limit, MAX_STEPS)
            stretch = following

    def _planned(self, stretch: Stretch, planning: Executor) -> StepGroup:
        plan = planning.submit(self._plan, stretch)
        planning.submit(lambda: self._source.prepare(plan.result().samples.reshape(-1)))
        return StepGroup(stretch.epoch, plan, 0, stretch.consumed, stretch.batch_size)

    def _plan(self, stretch: Stretch) -> StepPlan:
        positions, mask = self._steps.positions(stretch)
        samples = self._sampler(stretch.epoch, positions.reshape(-1))
        return StepPlan(positions, samples.reshape(positions.shape), mask)

    def _read_ahead(self, blocks: Callable[[int, Int64s], Int64s], group: StepGroup) -> None:
        self._source.read_ahead(blocks(group.epoch, group.plan.positions.reshape(-1)))

    def _depth(self) -> int:
        """Return how many groups are read, or wait for the consumer, at a time."""
        if not self._threads:
            return 1
        return max(self._threads + 1, self._prefetch_bytes // max(GROUP, self._reader.batch_bytes))


def _pool(threads: int) -> Executor:
    """Return an executor of so many threads, in each of which torch uses that thread only."""
    if not threads:
        return _WhenAsked()
    executor = ThreadPoolExecutor(threads, "hpctrain-loader")
    intra_op, all_here = torch.get_num_threads(), Barrier(threads + 1)
    for _ in range(threads):
        executor.submit(_begin, all_here)
    try:
        all_here.wait()
    except BaseException:
        all_here.abort()
        raise
    torch.set_num_threads(intra_op)  # threads that start later begin with this number
    return executor


def _begin(all_here: Barrier) -> None:
    torch.set_num_threads(1)  # for this thread, but also for threads that start later
    all_here.wait()


class _WhenAsked(Executor):
    """Runs a call when, and in the thread in which, its result is needed; otherwise never."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor`."""
        return _Later(lambda: fn(*args, **kwargs))


class _Later(Future[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._call())
        return super().result(timeout)
