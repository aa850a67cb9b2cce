"""What a loader reads: batches from a state on, ahead of its consumer or when they are asked for.

Python's own time per batch would exceed that of the copy, where batches are small. So a thread
reads several at once, a *group*, into one buffer, and the consumer gets views of it. While it
waits, it reads a group itself; if waiting for memory is all that it does, nothing is read ahead,
and it reads with as many threads of torch's. The batches are the same in any case.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch

from hpctrain.data.buffers import Buffers
from hpctrain.data.collate import Collate, Layout
from hpctrain.data.pace import Pace
from hpctrain.data.plan import Group, Plan, Planner
from hpctrain.data.ragged import Ragged
from hpctrain.data.samplers.order import Sampler
from hpctrain.data.source import Locates, Source, part_by_part
from hpctrain.data.steps import Steps
from hpctrain.data.threads import intra_op, pool, team
from hpctrain.data.types import Array, Batch
from hpctrain.data.workers.pool import Workers

GROUP = 2**23  # bytes, about, that a thread reads at once: to hand them over takes time, too
MAX_GROUP = 64  # steps, and of a part
# What is read when it is asked for is read in parts, and PARTS of them are found at once.
PART = 2**21  # bytes, about, for each of torch's threads: they stay in the cache of a core
PARTS = 16


class Part(NamedTuple):
    """Batches that are there: those of a group from its step `first` on."""

    group: Group
    first: int
    batches: deque[Batch]


_Ahead = tuple[Group, Future[deque[Batch]]]


class Reading:
    """Reads the batches of one rank, for the one that iterates over `parts`; see `Loader`.

    Args:
        source: Where the samples come from.
        sampler: Which sample stands at a position.
        steps: Which positions each step has.
        seed: Of the workers' random choices.
        threads: That read ahead, at most one less than there are cores; 0 reads when asked.
        prefetch_bytes: Read ahead about so many, and at least one group for each thread.
        collate: What becomes of variable-length fields.
        pin_memory: In page-locked memory; nothing without CUDA.
        workers: Transform the samples.

    Attributes:
        wait_s: Seconds that the consumer has waited for parts.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler,
        steps: Steps,
        *,
        seed: int,
        threads: int,
        prefetch_bytes: int,
        collate: Layout,
        pin_memory: bool,
        workers: Workers | None,
    ) -> None:
        self._source, self._workers, self._seed = source, workers, seed
        self._locates = source if isinstance(source, Locates) and workers is None else None
        self._cores = cores = len(os.sched_getaffinity(0))
        if workers is not None and threads:  # a thread waits while its batch is transformed
            threads = max(threads, 2 * workers.count)
        elif threads:  # one core is the consumer's
            threads = min(threads, max(1, cores - 1))
        self._threads, self._prefetch_bytes = threads, prefetch_bytes
        # While it has nothing to do but wait, the consumer reads as well.
        self._helps = threads > 0 and cores > 1 and workers is None
        self._team = 1  # of torch's threads, when the consumer reads what it has asked for
        pin = pin_memory and torch.cuda.is_available()
        self._buffers = Buffers(pin)
        self._collate = Collate(source.fields, collate, self._buffers, pin=pin)
        self._planner = Planner(steps, sampler, source, self._collate.masks)
        self._share = steps.share
        self._fixed = {name: f for name, f in source.fields.items() if not f.variable}
        # What a variable-length field adds is seen: the most so far.
        self._sample_bytes = sum(field.nbytes for field in self._fixed.values())
        self._varies = len(self._fixed) < len(source.fields)
        self._ahead: deque[_Ahead] = deque()
        self._pace = Pace()
        self.wait_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether the next part is there."""
        return bool(self._ahead and self._ahead[0][1].done())

    def parts(self, consumed: int) -> Generator[Part, None, None]:
        """Yield what comes after the state `consumed`; its threads end with the iterator."""
        readers, planning = pool(self._threads), pool(min(1, self._threads))
        groups = self._planner.groups(consumed, planning, self._threads > 0, self._most)
        self._ahead = deque()
        self._team = team(min(self._threads + 1, self._cores))
        ending = sys.is_finalizing
        try:
            asked = time.perf_counter()
            for part in self._parts(groups, readers):
                nbytes = len(part.batches) * self._share * self._sample_bytes
                there = time.perf_counter()
                self.wait_s += there - asked
                yield part
                now = time.perf_counter()
                self._pace.saw(there - asked, now - there, nbytes)
                asked = now
        finally:  # also when the consumer breaks out, or drops the iterator
            if not ending():  # Python has joined the threads by then, and taken its modules apart
                readers.shutdown(cancel_futures=True)
                planning.shutdown(cancel_futures=True)

    def _parts(self, groups: Iterator[Group], readers: Executor) -> Iterator[Part]:
        ahead = self._ahead
        # The first is the consumer's own: it is to wait for nothing else.
        begin = None if self._when_asked() else next(groups, None)
        while True:
            while not self._when_asked() and len(ahead) + (begin is not None) < self._depth():
                if (group := next(groups, None)) is None:
                    break
                ahead.append((group, readers.submit(self._read, group)))
            if begin is not None:
                with intra_op(1):
                    batches = self._read(begin)
                yield Part(begin, 0, batches)
                begin = None
            elif ahead:
                group, future = ahead.popleft()
                self._help(future, ahead)
                yield Part(group, 0, future.result())
            elif (group := next(groups, None)) is not None:
                yield from self._in_parts(group)
            else:
                return

    def _when_asked(self) -> bool:
        """Whether it is of no use to read ahead."""
        if not self._threads:
            return self._workers is None
        if self._team == 1 or not self._pace.of_memory:
            return False
        return self._locates is not None and self._locates.mapped

    def _in_parts(self, group: Group) -> Iterator[Part]:
        """Read a group, found at once, a part at a time."""
        plan, steps = group.plan, self._steps_of_part()
        samples, count = plan.samples.reshape(-1), steps * self._share
        if self._locates is None:
            read = part_by_part(self._source, samples, count)
        else:
            read = self._locates.located(samples, count)
        for part, first in enumerate(range(0, len(group.consumed), steps)):
            masks = plan.masks[first : first + steps]
            with intra_op(self._team):
                batches = self._collate(read(part, self._room(len(masks))), masks)
            self._learn(batches)
            yield Part(group, first, batches)

    def _help(self, future: Future[deque[Batch]], ahead: deque[_Ahead]) -> None:
        """While this one is not there, read those behind it that nobody has begun."""
        while self._helps and not future.done():
            for i, (other, waiting) in enumerate(ahead):
                if waiting.cancel():
                    with intra_op(1):
                        ahead[i] = other, _done(self._read, other)
                    break
            else:
                break

    def _depth(self) -> int:
        """Groups that are read, or wait to be handed out."""
        if not self._threads:
            return 1
        group = max(GROUP, self._share * self._sample_bytes)
        return max(self._threads + 1, self._prefetch_bytes // group)

    def _most(self) -> int:
        """Steps of a group."""
        return PARTS * self._steps_of_part() if self._when_asked() else self._steps_of(GROUP)

    def _steps_of_part(self) -> int:
        return self._steps_of(self._team * PART)

    def _steps_of(self, nbytes: int) -> int:
        """How many steps make about so many bytes."""
        size = max(1, self._share * self._sample_bytes)
        return min(MAX_GROUP, max(1, nbytes // size))

    def _read(self, group: Group) -> deque[Batch]:
        """Read a group's batches."""
        plan = group.plan
        batches = self._collate(self._rows(group.epoch, plan), plan.masks)
        self._learn(batches)
        return batches

    def _learn(self, batches: deque[Batch]) -> None:
        """Take note of how large samples are, where that varies."""
        if self._varies:
            nbytes = max(sum(value.nbytes for value in batch.values()) for batch in batches)
            self._sample_bytes = max(self._sample_bytes, nbytes // self._share)

    def _rows(self, epoch: int, plan: Plan) -> Mapping[str, Array | Ragged]:
        samples = plan.samples.reshape(-1)
        if self._workers is not None:
            positions = plan.positions.reshape(-1)
            return self._workers.submit((self._seed, epoch), positions, samples).result()
        return self._source.read(samples, self._room(len(plan.samples)))

    def _room(self, steps: int) -> dict[str, Array]:
        """Arrays for the fixed-size fields of so many steps."""
        count = steps * self._share
        return {
            name: self._buffers.take((count, *field.shape), field.dtype)
            for name, field in self._fixed.items()
        }


def _done(read: Callable[[Group], deque[Batch]], group: Group) -> Future[deque[Batch]]:
    """A future that is done; an exception waits in it for its turn."""
    future: Future[deque[Batch]] = Future()
    try:
        future.set_result(read(group))
    except Exception as error:
        future.set_exception(error)
    return future
