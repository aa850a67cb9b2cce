"""Batches for one data-parallel rank: exact, elastic, read ahead by threads.

The data state is one integer: `consumed`, the samples that the training has been given, counted
globally over all epochs. Everything else follows from it:

    count 10, global batch 4, 2 ranks          epoch 0              epoch 1
    positions                                  0 1 2 3 4 5 6 7 8 9  0 1 2 3 …
    step 0: rank 0 reads 0 1, rank 1 2 3       └─0─┘ └─1─┘
    step 1: consumed 4 → 8                             └─0─┘ └─1─┘
    tail "drop": 8 9 are left out, consumed becomes 10: the next epoch begins
    tail "pad":  a third step 8 9 8' 8', whose last two are masked, then the next epoch

A sampler (`hpctrain.data.order` and its neighbours) says which sample stands at a position. So
the global batch of a step is the same, in the same order, for every number of ranks, and a run
resumed with other ranks or another batch size continues the same sequence. Every rank makes the
same steps.

    >>> loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=0, dp_size=2)
    >>> for batch in loader:                 # for ever, or max_epochs
    ...     step(batch)
    ...     save(loader.state_dict())        # after step k: resumes with batch k + 1

The evaluation loader, which gives each sample exactly once over all ranks, is
`Loader(…, shuffle=False, tail="pad", max_epochs=1)`, with the loss of masked samples left out.

Python's own time per batch would exceed that of the copy, where batches are small. So a thread
reads several at once, a *group* of about GROUP bytes, into one buffer, and the consumer gets
views of it. Nothing else depends on the groups.
"""

import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from math import prod
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.buffers import Buffers
from hpctrain.data.index import Field
from hpctrain.data.order import Order, Sampler
from hpctrain.data.ragged import Array, Ragged
from hpctrain.data.threads import pool
from hpctrain.errors import ConfigError, DataError

Batch = dict[str, torch.Tensor]
Tail = Literal["drop", "pad"]
Int64s = NDArray[np.int64]

MASK = "mask"
LENGTH = "_length"
# torch stores these, but hardly computes with them.
WIDER = {"uint16": "int32", "uint32": "int64"}

GROUP = 2**23  # bytes that are read at once: they stay in the cache on their way
MAX_GROUP = 64  # steps
STRETCH = 16_384  # positions that a sampler is asked for at once


class Source(Protocol):
    """What a loader reads from: a `Reader`, or anything with the same three."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The schema of what `read` returns."""

    def __len__(self) -> int: ...

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, in that order, in arrays that belong to the caller.

        `out` may have arrays (n, *shape) to fill, for some of the fixed-size fields.
        """


class Loader:
    """Iterates over this rank's batches, continuing from the state.

    A batch has for each field a tensor (b, *shape) with b = global_batch_size / dp_size: the
    dtype of the field, but uint16 becomes int32 and uint32 int64. A variable-length field is
    padded with zeros to the longest of the batch, (b, longest, *shape), and FIELD_length is
    int64 (b,). "mask" is bool (b,): False for a repeated sample that only fills up the tail.

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
        threads: That read ahead; 0 reads when asked.
        prefetch_bytes: Read ahead about so many, and at least one group for each thread.
        pin_memory: In page-locked memory, for asynchronous copies to the GPU; nothing without
            CUDA.

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
        pin_memory: bool = False,
    ) -> None:
        self._sampler = sampler or Order(len(source), seed, shuffle)
        count = self._sampler.count
        _check(count, global_batch_size, dp_rank, dp_size, tail, max_epochs)
        if threads < 0 or prefetch_bytes < 0:
            raise ConfigError(
                f"threads {threads} and prefetch_bytes {prefetch_bytes} cannot be negative"
            )
        _check_names(source.fields)
        self._source, self._count = source, count
        self._batch_size, self._dp_rank, self._dp_size = global_batch_size, dp_rank, dp_size
        self._tail, self._max_epochs = tail, max_epochs
        self._threads, self._prefetch_bytes = threads, prefetch_bytes
        self._helps = 0 < threads < len(os.sched_getaffinity(0))
        self._share = global_batch_size // dp_size
        self._pin = pin_memory and torch.cuda.is_available()
        self._buffers = Buffers(self._pin)
        fixed = [field for field in source.fields.values() if not field.variable]
        # What a variable-length field adds is known after the first batches.
        self._sample_bytes = sum(np.dtype(f.dtype).itemsize * prod(f.shape) for f in fixed)
        self._bytes_known = len(fixed) == len(source.fields)
        self._consumed = 0
        self._iteration = 0
        self.wait_s = 0.0
        whole, rest = divmod(count, global_batch_size)
        self.steps_per_epoch = whole + (rest > 0 and tail == "pad")

    @property
    def epoch(self) -> int:
        """Whole epochs consumed: after the last batch of the first one it is 1."""
        return self._consumed // self._count

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
        readers, planner = pool(self._threads), pool(min(1, self._threads))
        ahead: deque[_Ahead] = deque()
        groups = self._groups(self._stretches(self._consumed), planner)
        try:
            while True:
                while len(ahead) < self._depth() and (group := next(groups, None)):
                    ahead.append((group, readers.submit(self._read, group)))
                if not ahead:
                    return
                start = time.perf_counter()
                group, batches = self._next(ahead)
                self.wait_s += time.perf_counter() - start
                for consumed in group.consumed:
                    self._consumed = consumed
                    yield batches.popleft()
                    if iteration != self._iteration:
                        raise RuntimeError(
                            "this iterator of the loader has ended: its state was loaded, or "
                            "another iterator begun. Call iter() again"
                        )
        finally:  # also when the consumer breaks out, or drops the iterator
            readers.shutdown(cancel_futures=True)
            planner.shutdown(cancel_futures=True)

    def _next(self, ahead: "deque[_Ahead]") -> tuple["_Group", deque[Batch]]:
        """The next group's batches. Who has to wait for them reads one of those behind."""
        group, future = ahead.popleft()
        while self._helps and not future.done():
            for i, (other, waiting) in enumerate(ahead):
                if waiting.cancel():
                    ahead[i] = other, _done(self._read, other)
                    break
            else:
                break
        return group, future.result()

    def _depth(self) -> int:
        """Groups that are read, or wait to be handed out."""
        if not self._threads:
            return 1
        group = max(GROUP, self._share * self._sample_bytes)
        return max(self._threads + 1, self._prefetch_bytes // group)

    def _stretches(self, consumed: int) -> Iterator["_Stretch"]:
        """The steps from `consumed` on."""
        while True:
            consumed = self._settle(consumed)
            epoch, offset = divmod(consumed, self._count)
            if self._max_epochs is not None and epoch >= self._max_epochs:
                return
            whole = (self._count - offset) // self._batch_size
            steps = max(1, min(whole, STRETCH // self._share))
            ends = [min(offset + n * self._batch_size, self._count) for n in range(1, steps + 1)]
            begin = consumed - offset
            stretch = _Stretch(epoch, offset, [self._settle(begin + end) for end in ends])
            yield stretch
            consumed = stretch.consumed[-1]

    def _settle(self, consumed: int) -> int:
        """Leave out a tail that is too short for a batch."""
        left = self._count - consumed % self._count
        return consumed + left if self._tail == "drop" and left < self._batch_size else consumed

    def _groups(self, stretches: Iterator["_Stretch"], planner: Executor) -> Iterator["_Group"]:
        """Steps that are read at once, with the samples of the next stretch on their way."""
        planned = ((s, planner.submit(self._indices, s)) for s in stretches)
        current = next(planned, None)
        while current is not None:
            stretch, samples = current
            current = next(planned, None)
            first = 0
            while first < len(stretch.consumed):
                last = first + self._group_steps()
                yield _Group(samples, first, stretch.consumed[first:last])
                first = last

    def _group_steps(self) -> int:
        if not self._bytes_known:
            return 1
        return min(MAX_GROUP, max(1, GROUP // max(1, self._share * self._sample_bytes)))

    def _indices(self, stretch: "_Stretch") -> tuple[Int64s, NDArray[np.bool_]]:
        """This rank's samples of a stretch, and whether they count: (steps, b) each."""
        steps = np.arange(len(stretch.consumed))[:, None] * self._batch_size
        first = stretch.offset + self._dp_rank * self._share
        positions = first + steps + np.arange(self._share)
        mask = positions < self._count
        positions = np.minimum(positions, self._count - 1)
        samples = self._sampler(stretch.epoch, positions.reshape(-1))
        return samples.reshape(positions.shape), mask

    def _read(self, group: "_Group") -> deque[Batch]:
        """Read a group's batches.

        Few of torch's operations: each gives way to other threads, and waits for its turn.
        """
        samples, mask = group.samples.result()
        chosen = slice(group.first, group.first + len(group.consumed))
        samples, mask = samples[chosen], mask[chosen]
        steps, share = samples.shape
        fields = self._source.fields
        rows = self._source.read(
            samples.reshape(-1),
            {
                name: self._buffers.take((steps * share, *field.shape), field.dtype)
                for name, field in fields.items()
                if not field.variable
            },
        )
        columns: dict[str, Sequence[torch.Tensor]] = {MASK: self._split(mask.copy())}
        for name, field in fields.items():
            value = rows[name]
            if isinstance(value, Ragged):
                parts = [value.rows(i * share, (i + 1) * share) for i in range(steps)]
                columns[name] = [self._tensor(part.pad(), field) for part in parts]
                columns[name + LENGTH] = self._split(value.lengths.reshape(steps, share))
            else:
                array = value.reshape(steps, share, *field.shape)
                columns[name] = self._tensor(array, field).unbind()
        if not self._bytes_known:
            self._sample_bytes = sum(column[0].nbytes for column in columns.values()) // share
            self._bytes_known = True
        batches = zip(*columns.values(), strict=True)
        return deque(dict(zip(columns, batch, strict=True)) for batch in batches)

    def _tensor(self, array: Array, field: Field) -> torch.Tensor:
        """In the dtype and memory that the consumer gets."""
        tensor = torch.from_numpy(array)
        if field.dtype in WIDER:
            wide = self._buffers.take(array.shape, WIDER[field.dtype])
            tensor = torch.from_numpy(wide).copy_(tensor)
        return self._pinned(tensor)

    def _split(self, array: Array) -> tuple[torch.Tensor, ...]:
        return self._pinned(torch.from_numpy(array)).unbind()

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pin and not tensor.is_pinned() else tensor


class _Stretch(NamedTuple):
    """Steps of one epoch: where the first begins, and `consumed` after each."""

    epoch: int
    offset: int
    consumed: list[int]


class _Group(NamedTuple):
    """Some steps of a stretch, read at once."""

    samples: Future[tuple[Int64s, NDArray[np.bool_]]]
    first: int
    consumed: list[int]


_Ahead = tuple[_Group, Future[deque[Batch]]]


def _done(read: Callable[[_Group], deque[Batch]], group: _Group) -> Future[deque[Batch]]:
    """A future that is done; an exception waits in it for its turn."""
    future: Future[deque[Batch]] = Future()
    try:
        future.set_result(read(group))
    except Exception as error:
        future.set_exception(error)
    return future


def _check(
    count: int,
    batch: int,
    dp_rank: int,
    dp_size: int,
    tail: str,
    max_epochs: int | None,
) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} of {dp_size}: it is 0 to {dp_size - 1}")
    if batch < 1 or batch % dp_size:
        raise ConfigError(
            f"global batch size {batch} cannot be divided among {dp_size} data-parallel ranks; "
            f"it must be a positive multiple of {dp_size}"
        )
    if tail not in ("drop", "pad"):
        raise ConfigError(f"tail {tail!r}: it is 'drop' or 'pad'")
    if max_epochs is not None and max_epochs < 0:
        raise ConfigError(f"max_epochs {max_epochs} cannot be negative")
    if batch > count and tail == "drop":
        raise DataError(
            f"global batch size {batch} is larger than the data set, {count} samples: no batch "
            "is ever full. Use a smaller one, or tail 'pad'"
        )


def _check_names(fields: Mapping[str, Field]) -> None:
    lengths = {name + LENGTH for name, field in fields.items() if field.variable}
    taken = sorted(set(fields) & (lengths | {MASK}))
    if taken:
        raise DataError(f"the loader needs the name {taken[0]!r} itself; rename that field")
