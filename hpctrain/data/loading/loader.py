"""Batches for one data-parallel rank, which threads read ahead.

The state is one integer: how many samples the training has been given, over all ranks and epochs
(`hpctrain.data.loading.steps` explains it). A sampler says which sample stands at a position. So
the global batch of a step is the same, in the same order, for every number of ranks, and a run that
is resumed with another number of ranks or another batch size continues the same sequence.

    >>> loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=0, dp_size=2)
    >>> for batch in loader:                 # without end, or max_epochs
    ...     step(batch)
    ...     save(loader.state_dict())        # after step k: resumes with batch k + 1

For an evaluation, `Loader(…, shuffle=False, tail="pad", max_epochs=1)` gives each sample exactly
once over all ranks; the loss leaves masked samples out.
"""

import operator
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from hpctrain.base.errors import DataError
from hpctrain.data.loading.collate import Buffers, Collate, Layout
from hpctrain.data.loading.prefetcher import BatchReader, Prefetcher
from hpctrain.data.loading.steps import Step, Steps, Tail
from hpctrain.data.samplers.order import Order, Sampler
from hpctrain.data.shards.types import Batch
from hpctrain.data.source import SampleId, Source
from hpctrain.data.workers.pool import Workers


class Loader:
    """Iterates over this rank's batches, from the loader's state on.

    A batch has b = dp_count * global_batch_size / dp_size samples of each field, and a mask: see
    `hpctrain.data.loading.collate`. uint16 becomes int32, and uint32 becomes int64. The memory of a
    batch is used again only after the consumer has dropped it. There is one iterator at a time: a
    new one, or `load_state_dict`, ends the one before.

    This rank is `dp_rank` of the `dp_size` that divide the data. It takes the samples of `dp_count`
    ranks from there on, so that a faster one can have more. `ramp` has pairs of a smaller global
    batch size and the number of its steps, which come first. Without a `sampler` each epoch has all
    samples, with `shuffle` in an order that `seed` decides. An incomplete last batch of an epoch is
    left out (tail "drop") or filled up ("pad"). The iterator ends after `max_epochs`, counted from
    the state 0, or never.

    `threads` read about `prefetch_bytes` ahead, and at least one group of batches each. One core is
    left to the consumer; with 0 the consumer reads when it needs a batch. Variable-length fields
    are padded ("pad") or joined end to end ("pack"). `pin_memory` allows asynchronous copies to a
    GPU. With `workers` a batch has the fields that their transforms return. `steps` counts batches.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        dp_count: int = 1,
        sampler: Sampler | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "drop",
        max_epochs: int | None = None,
        ramp: Sequence[tuple[int, int]] = (),
        threads: int = 1,
        prefetch_bytes: int = 64 * 2**20,
        collate: Layout = "pad",
        pin_memory: bool = False,
        workers: Workers | None = None,
    ) -> None:
        self._source = source
        sampler = sampler or Order(len(source), seed, shuffle)
        ranks = {"dp_rank": dp_rank, "dp_size": dp_size, "dp_count": dp_count}
        self.steps = Steps(
            sampler.count, global_batch_size, **ranks, tail=tail, max_epochs=max_epochs, ramp=ramp
        )
        if threads and workers is not None:  # a thread waits while its batches are transformed
            threads = max(threads, 2 * workers.count)
        elif threads:  # one core is the consumer's
            threads = min(threads, max(1, len(os.sched_getaffinity(0)) - 1))
        made = Collate(source.fields, collate, Buffers(pin_memory))
        reader = BatchReader(source, self.steps.share, made, workers=workers, seed=seed)
        self._prefetcher = Prefetcher(
            *(self.steps, sampler, source, reader), threads=threads, prefetch_bytes=prefetch_bytes
        )
        self._consumed = self._iteration = 0
        self._here: deque[Batch] = deque()  # the batches of the current group that are left
        self._last: Step | None = None  # whose batch was handed out last
        self.steps_per_epoch = self.steps.steps_per_epoch

    @property
    def wait_s(self) -> float:
        """Seconds that the consumer has waited for batches."""
        return self._prefetcher.wait_s

    @property
    def count(self) -> int:
        """The number of positions in an epoch: of samples, if the sampler takes each once."""
        return self.steps.count

    @property
    def epoch(self) -> int:
        """The number of whole epochs consumed: after the last batch of the first epoch it is 1."""
        return self._consumed // self.steps.count

    @property
    def last(self) -> Step:
        """The step whose batch was handed out last. Keeping it keeps its plan, not its batch."""
        if self._last is None:
            raise RuntimeError("the loader has not handed out a batch yet")
        return self._last

    def samples(self, step: Step | None = None) -> list[SampleId]:
        """Return where the samples of a step (by default `last`) are stored, in order."""
        return self._source.sample_ids((step or self.last).samples)

    @property
    def ready(self) -> bool:
        """Whether the next batch has been read, so that `next()` would not wait."""
        return bool(self._here) or self._prefetcher.ready

    def state_dict(self) -> dict[str, int]:
        """Return the number of samples handed out, over all ranks and epochs."""
        return {"consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next `iter()` continue from `state`."""
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
        self._here = deque()
        with closing(self._prefetcher.read(self._consumed)) as groups:
            for group, self._here in groups:
                for number, self._consumed in enumerate(group.consumed):
                    self._last = Step(group, number)
                    # Taken out: a batch that the consumer has dropped shall not live on here.
                    yield self._here.popleft()
                    self._check_current(iteration)

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "this iterator of the loader has ended: its state was loaded, or another iterator "
                "begun. Call iter() again"
            )
