"""Batches for one data-parallel rank: exact, elastic, read ahead by threads.

The data state is one integer, the samples that the training has been given, over all ranks and
epochs; `hpctrain.data.steps` has what follows from it. A sampler (`hpctrain.data.samplers`) says
which sample stands at a position. So the global batch of a step is the same, in the same order,
for every number of ranks, and a run resumed with other ranks or another batch size continues the
same sequence.

    >>> loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=0, dp_size=2)
    >>> for batch in loader:                 # for ever, or max_epochs
    ...     step(batch)
    ...     save(loader.state_dict())        # after step k: resumes with batch k + 1

The evaluation loader, which gives each sample exactly once over all ranks, is
`Loader(…, shuffle=False, tail="pad", max_epochs=1)`, with the loss of masked samples left out.

Python's own time per batch would exceed that of the copy, where batches are small. So a thread
reads several at once, a *group*, into one buffer, and the consumer gets views of it. While it
waits, it reads a group itself; if waiting for memory is all that it does, nothing is read ahead,
and it reads with as many threads of torch's. Nothing else depends on any of this.
"""

import operator
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.buffers import Buffers
from hpctrain.data.collate import Batch, Collate, Layout
from hpctrain.data.pace import Pace
from hpctrain.data.plan import Group, Plan, Planner
from hpctrain.data.ragged import Array, Ragged
from hpctrain.data.samplers.order import Order, Sampler
from hpctrain.data.source import Locates, Source, part_by_part
from hpctrain.data.steps import Steps, Tail
from hpctrain.data.threads import intra_op, pool, team
from hpctrain.data.workers.pool import Workers
from hpctrain.errors import ConfigError, DataError

Int64s = NDArray[np.int64]

GROUP = 2**23  # bytes, about, that a thread reads at once: to hand them over takes time, too
MAX_GROUP = 64  # steps, and of a part
# What is read when it is asked for is read in parts, and PARTS of them are found at once.
PART = 2**21  # bytes, about, for each of torch's threads: they stay in the cache of a core
PARTS = 16

_Ahead = tuple[Group, Future[deque[Batch]]]
_Part = tuple[Group, int, deque[Batch]]  # of a group, from this step on


class Loader:
    """Iterates over this rank's batches, continuing from the state.

    A batch has b = global_batch_size / dp_size samples of each field, and a mask: see
    `hpctrain.data.collate`. Its dtypes are those of the fields, but uint16 becomes int32 and
    uint32 int64.

    A batch is the consumer's as long as it is kept. One iterator at a time: a new one, or
    `load_state_dict`, ends the one before.

    Args:
        source: Where the samples come from.
        global_batch_size: Samples of one step, over all ranks.
        dp_rank: This rank among the `dp_size` that divide the data.
        dp_size: Data-parallel ranks.
        sampler: Which sample stands at a position; without it all, by `shuffle` and `seed`.
        shuffle: In another order each epoch; False: in the order of the shards.
        seed: Of the order; the same on every rank.
        tail: What becomes of an incomplete last batch of an epoch.
        max_epochs: After these the iterator ends, also when it was resumed; None: never.
        threads: That read ahead, at most one less than there are cores, whose last is the
            consumer's; 0 reads when asked.
        prefetch_bytes: Read ahead about so many, and at least one group for each thread.
        collate: What becomes of variable-length fields: "pad" or "pack".
        pin_memory: In page-locked memory, for asynchronous copies to the GPU; nothing without
            CUDA.
        workers: Transform the samples; a batch then has the fields that they return.

    Attributes:
        steps_per_epoch: Batches of a whole epoch.
        wait_s: Seconds that the consumer has waited for batches.

    Raises:
        ConfigError: Sizes or ranks that do not fit together.
        DataError: Fewer samples than one batch (tail "drop"), or a field named "mask".
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        sampler: Sampler | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "drop",
        max_epochs: int | None = None,
        threads: int = 1,
        prefetch_bytes: int = 64 * 2**20,
        collate: Layout = "pad",
        pin_memory: bool = False,
        workers: Workers | None = None,
    ) -> None:
        self._sampler = sampler or Order(len(source), seed, shuffle)
        self._steps = Steps(
            self._sampler.count,
            global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            tail=tail,
            max_epochs=max_epochs,
        )
        if threads < 0 or prefetch_bytes < 0:
            raise ConfigError(
                f"threads {threads} and prefetch_bytes {prefetch_bytes} cannot be negative"
            )
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
        self._planner = Planner(self._steps, self._sampler, source, self._collate.masks)
        self._fixed = {name: f for name, f in source.fields.items() if not f.variable}
        # What a variable-length field adds is seen: the most so far.
        self._sample_bytes = sum(field.nbytes for field in self._fixed.values())
        self._varies = len(self._fixed) < len(source.fields)
        self._consumed = self._iteration = 0
        self._here: deque[Batch] = deque()
        self._ahead: deque[_Ahead] = deque()
        self._last: tuple[Group | None, int] = (None, 0)
        self._pace = Pace()
        self.wait_s = 0.0
        self.steps_per_epoch = self._steps.steps_per_epoch

    @property
    def count(self) -> int:
        """Positions in an epoch: samples, unless the sampler repeats or leaves out some."""
        return self._steps.count

    @property
    def epoch(self) -> int:
        """Whole epochs consumed: after the last batch of the first one it is 1."""
        return self._consumed // self._steps.count

    @property
    def where(self) -> tuple[int, Int64s]:
        """Epoch, and positions in it, int64 (b,), of the batch handed out last.

        Raises:
            RuntimeError: There was none.
        """
        group, step = self._last
        if group is None:
            raise RuntimeError("the loader has not handed out a batch yet")
        return group.epoch, group.plan.positions[step]

    @property
    def ready(self) -> bool:
        """Whether the next batch is there: `next()` would not wait."""
        return bool(self._here) or bool(self._ahead and self._ahead[0][1].done())

    def state_dict(self) -> dict[str, int]:
        """The samples handed out (not those read ahead), over all ranks and epochs."""
        return {"consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`; the next `iter()` does.

        Raises:
            DataError: It is not a state of this class.
        """
        try:
            consumed = operator.index(state["consumed"])
        except (KeyError, TypeError):
            raise DataError(f"not the state of a loader: {dict(state)!r}") from None
        if consumed < 0:
            raise DataError(f"the state of the loader has consumed = {consumed}; it is >= 0")
        self._consumed = consumed
        self._iteration += 1

    def __iter__(self) -> Iterator[Batch]:
        self._iteration += 1
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[Batch]:
        self._check_current(iteration)
        readers, planning = pool(self._threads), pool(min(1, self._threads))
        groups = self._planner.groups(self._consumed, planning, self._threads > 0, self._most)
        self._here, self._ahead = deque(), deque()
        self._team = team(min(self._threads + 1, self._cores))
        found = self._parts(groups, readers)
        ending = sys.is_finalizing
        try:
            while True:
                start = time.perf_counter()
                if (part := next(found, None)) is None:
                    return
                there = time.perf_counter()
                self.wait_s += there - start
                group, first, batches = part
                self._here = batches
                steps = len(batches)
                for step in range(first, first + steps):
                    self._consumed, self._last = group.consumed[step], (group, step)
                    # A deque's, for nothing here is to keep a batch that its consumer has dropped.
                    yield batches.popleft()
                    self._check_current(iteration)
                nbytes = steps * self._steps.share * self._sample_bytes
                self._pace.saw(there - start, time.perf_counter() - there, nbytes)
        finally:  # also when the consumer breaks out, or drops the iterator
            if not ending():  # Python has joined the threads by then, and taken its modules apart
                readers.shutdown(cancel_futures=True)
                planning.shutdown(cancel_futures=True)

    def _parts(self, groups: Iterator[Group], readers: Executor) -> Iterator[_Part]:
        """What is read ahead, or when asked, in order."""
        ahead = self._ahead
        while True:
            while not self._when_asked() and len(ahead) < self._depth():
                if (group := next(groups, None)) is None:
                    break
                ahead.append((group, readers.submit(self._read, group)))
            if ahead:
                group, future = ahead.popleft()
                self._help(future, ahead)
                yield group, 0, future.result()
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

    def _in_parts(self, group: Group) -> Iterator[_Part]:
        """Read a group, found at once, a part at a time."""
        plan, steps = group.plan, self._steps_of_part()
        samples, count = plan.samples.reshape(-1), steps * self._steps.share
        if self._locates is None:
            read = part_by_part(self._source, samples, count)
        else:
            read = self._locates.located(samples, count)
        for part, first in enumerate(range(0, len(group.consumed), steps)):
            masks = plan.masks[first : first + steps]
            with intra_op(self._team):
                batches = self._collate(read(part, self._room(len(masks))), masks)
            self._learn(batches)
            yield group, first, batches

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "this iterator of the loader has ended: its state was loaded, or another iterator "
                "begun. Call iter() again"
            )

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
        group = max(GROUP, self._steps.share * self._sample_bytes)
        return max(self._threads + 1, self._prefetch_bytes // group)

    def _most(self) -> int:
        """Steps of a group."""
        return PARTS * self._steps_of_part() if self._when_asked() else self._steps_of(GROUP)

    def _steps_of_part(self) -> int:
        return self._steps_of(self._team * PART)

    def _steps_of(self, nbytes: int) -> int:
        """How many steps make about so many bytes."""
        size = max(1, self._steps.share * self._sample_bytes)
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
            self._sample_bytes = max(self._sample_bytes, nbytes // self._steps.share)

    def _rows(self, epoch: int, plan: Plan) -> Mapping[str, Array | Ragged]:
        samples = plan.samples.reshape(-1)
        if self._workers is not None:
            positions = plan.positions.reshape(-1)
            return self._workers.submit((self._seed, epoch), positions, samples).result()
        return self._source.read(samples, self._room(len(plan.samples)))

    def _room(self, steps: int) -> dict[str, Array]:
        """Arrays for the fixed-size fields of so many steps."""
        count = steps * self._steps.share
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
