"""Batches for one data-parallel rank: exact, elastic, read ahead in a thread.

The data state is one integer: `consumed`, the samples that the training has been given, counted
globally over all epochs. Everything else follows from it:

    count 10, global batch 4, 2 ranks          epoch 0              epoch 1
    positions                                  0 1 2 3 4 5 6 7 8 9  0 1 2 3 …
    step 0: rank 0 reads 0 1, rank 1 2 3       └─0─┘ └─1─┘
    step 1: consumed 4 → 8                             └─0─┘ └─1─┘
    tail "drop": 8 9 are left out, consumed becomes 10: the next epoch begins
    tail "pad":  a third step 8 9 8' 8', whose last two are masked, then the next epoch

`hpctrain.data.order` says which sample stands at a position. So the global batch of a step is
the same, in the same order, for every number of ranks, and a run resumed with other ranks or
another batch size continues the same sequence. Every rank makes the same steps.

    >>> loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=0, dp_size=2)
    >>> for batch in loader:                 # for ever, or max_epochs
    ...     step(batch)
    ...     save(loader.state_dict())        # after step k: resumes with batch k + 1

The evaluation loader, which gives each sample exactly once over all ranks, is
`Loader(…, shuffle=False, tail="pad", max_epochs=1)`, with the loss of masked samples left out.
"""

import operator
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.index import Field
from hpctrain.data.order import Order
from hpctrain.data.ragged import Array, Ragged
from hpctrain.errors import ConfigError, DataError

Batch = dict[str, torch.Tensor]
Tail = Literal["drop", "pad"]

MASK = "mask"
LENGTH = "_length"
# torch stores these, but hardly computes with them.
WIDER = {"uint16": np.int32, "uint32": np.int64}


class Source(Protocol):
    """What a loader reads from: a `Reader`, or anything with the same three."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The schema of what `read` returns."""

    def __len__(self) -> int: ...

    def read(self, indices: NDArray[np.int64]) -> Mapping[str, Array | Ragged]:
        """Return the samples `indices`, in that order, in arrays that belong to the caller."""


class Loader:
    """Iterates over this rank's batches, continuing from the state.

    A batch has for each field a tensor (b, *shape) with b = global_batch_size / dp_size: the
    dtype of the field, but uint16 becomes int32 and uint32 int64. A variable-length field is
    padded with zeros to the longest of the batch, (b, longest, *shape), and FIELD_length is
    int64 (b,). "mask" is bool (b,): False for a repeated sample that only fills up the tail.

    One iterator at a time: a new one, or `load_state_dict`, ends the one before.

    Args:
        reader: Where the samples come from.
        global_batch_size: Samples of one step, over all ranks.
        dp_rank: This rank among the `dp_size` that divide the data.
        dp_size: Data-parallel ranks.
        shuffle: In another order each epoch; False: in the order of the shards.
        seed: Of the order; the same on every rank.
        tail: What becomes of an incomplete last batch of an epoch.
        max_epochs: After these the iterator ends, also when it was resumed; None: never.
        prefetch: Batches read ahead by a thread; 0 reads when asked.
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
        reader: Source,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "drop",
        max_epochs: int | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        count = len(reader)
        _check(count, global_batch_size, dp_rank, dp_size, tail, max_epochs, prefetch)
        _check_names(reader.fields)
        self._reader, self._count = reader, count
        self._order = Order(count, seed, shuffle)
        self._batch_size, self._dp_rank, self._dp_size = global_batch_size, dp_rank, dp_size
        self._tail, self._max_epochs, self._prefetch = tail, max_epochs, prefetch
        self._pin = pin_memory and torch.cuda.is_available()
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
        plans = self._plans(self._consumed)
        # One thread: the batches come in order. Futures carry its exceptions here.
        pool = ThreadPoolExecutor(1, "hpctrain-loader") if self._prefetch else None
        ahead: deque[tuple[_Plan, Future[Batch]]] = deque()
        try:
            while True:
                while pool and len(ahead) <= self._prefetch and (plan := next(plans, None)):
                    ahead.append((plan, pool.submit(self._load, plan)))
                start = time.perf_counter()
                if ahead:
                    plan, future = ahead.popleft()
                    batch = future.result()
                    del future  # or it would hold the batch until the next one
                elif plan := next(plans, None):
                    batch = self._load(plan)
                else:
                    return
                self.wait_s += time.perf_counter() - start
                self._consumed = plan.consumed
                yield batch
                del batch
                if iteration != self._iteration:
                    raise RuntimeError(
                        "this iterator of the loader has ended: its state was loaded, or "
                        "another iterator begun. Call iter() again"
                    )
        finally:  # also when the consumer breaks out, or drops the iterator
            if pool:
                pool.shutdown(cancel_futures=True)

    def _plans(self, consumed: int) -> Iterator["_Plan"]:
        """What to read, from `consumed` on."""
        while True:
            consumed = self._settle(consumed)
            epoch, offset = divmod(consumed, self._count)
            if self._max_epochs is not None and epoch >= self._max_epochs:
                return
            left = self._count - offset
            consumed = self._settle(consumed + min(self._batch_size, left))
            yield _Plan(epoch, offset, consumed)

    def _settle(self, consumed: int) -> int:
        """Leave out a tail that is too short for a batch."""
        left = self._count - consumed % self._count
        return consumed + left if self._tail == "drop" and left < self._batch_size else consumed

    def _load(self, plan: "_Plan") -> Batch:
        """Read this rank's slice of a global batch."""
        size = self._batch_size // self._dp_size
        start = plan.offset + self._dp_rank * size
        positions = np.arange(start, start + size, dtype=np.int64)
        mask = positions < self._count
        np.minimum(positions, self._count - 1, out=positions)
        rows = self._reader.read(self._order(plan.epoch, positions))
        batch = {MASK: torch.from_numpy(mask)}
        for name, value in rows.items():
            if isinstance(value, Ragged):
                batch[name] = _tensor(value.pad())
                batch[name + LENGTH] = torch.from_numpy(value.lengths)
            else:
                batch[name] = _tensor(value)
        return {k: v.pin_memory() for k, v in batch.items()} if self._pin else batch


class _Plan(NamedTuple):
    """One global batch: where it begins, and `consumed` once it is handed out."""

    epoch: int
    offset: int
    consumed: int


def _tensor(array: Array) -> torch.Tensor:
    wider = WIDER.get(array.dtype.name)
    return torch.from_numpy(array if wider is None else array.astype(wider))


def _check(
    count: int,
    batch: int,
    dp_rank: int,
    dp_size: int,
    tail: str,
    max_epochs: int | None,
    prefetch: int,
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
    if prefetch < 0 or (max_epochs is not None and max_epochs < 0):
        raise ConfigError(f"prefetch {prefetch} and max_epochs {max_epochs} cannot be negative")
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
