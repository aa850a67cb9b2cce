"""Which positions each step has, and which of them this rank takes: arithmetic.

    count 10, global batch 4, 2 ranks          epoch 0              epoch 1
    positions                                  0 1 2 3 4 5 6 7 8 9  0 1 2 3 …
    step 0: rank 0 takes 0 1, rank 1 2 3       └─0─┘ └─1─┘
    step 1: consumed 4 → 8                             └─0─┘ └─1─┘
    tail "drop": 8 9 are left out, consumed becomes 10: the next epoch begins
    tail "pad":  a third step 8 9 8' 8', whose last two are masked, then the next epoch

`consumed` counts samples over all ranks and epochs. It is the whole state: a run can continue from
it with any number of ranks and any batch size. Every rank makes the same number of steps.

With a ramp the first steps are smaller. `consumed` says which stage of the ramp a step belongs to.

Which samples stand at the positions is planned before they are read (`prefetcher`): a stretch of
many steps at once, which is then read in groups of steps.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.types import Int64s

Tail = Literal["drop", "pad"]

_STRETCH = 16_384  # positions of a rank that are planned at once


class Stretch(NamedTuple):
    """Successive steps of one epoch: where they begin in it, `consumed` after each, their size."""

    epoch: int
    offset: int
    consumed: list[int]
    batch_size: int


class _Stage(NamedTuple):
    """The steps of one size, which begin from the states `begin` to `end` (without it)."""

    batch_size: int
    begin: int
    end: float


class Steps:
    """The steps of one rank; `Loader` explains the arguments.

    `share`, the samples of one step on this rank, and `steps_per_epoch` are those after the ramp.
    """

    def __init__(
        self,
        count: int,
        global_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        dp_count: int = 1,
        tail: Tail = "drop",
        max_epochs: int | None = None,
        ramp: Sequence[tuple[int, int]] = (),
    ) -> None:
        for size in (*(size for size, _ in ramp), global_batch_size):
            _check(count, size, dp_rank, dp_size, tail)
        self.count = count
        self._drops, self._max_epochs = tail == "drop", max_epochs
        self._dp_rank, self._dp_size, self._dp_count = dp_rank, dp_size, dp_count
        self.share = dp_count * (global_batch_size // dp_size)
        self.steps_per_epoch = self._steps_in(count, global_batch_size)
        self._stages: list[_Stage] = []
        begin = 0
        for size, steps in ramp:
            end = self._after(steps, begin, size)
            self._stages.append(_Stage(size, begin, end))
            begin = end
        self._stages.append(_Stage(global_batch_size, begin, math.inf))

    def steps_in(self, epochs: int) -> int:
        """Return the number of steps of the first `epochs` epochs."""
        end, total = epochs * self.count, 0
        for size, begin, after in self._stages:
            last = min(after, end)
            if begin < last:
                total += self._between(begin, int(last), size)
        return total

    def fills_up(self, steps: int) -> bool:
        """Return whether one of the first `steps` steps has positions that do not count."""
        final = self._stages[-1]
        for stretch in () if self._drops else self.stretches(0):
            if stretch.offset == 0 and stretch.epoch * self.count >= final.begin:
                # From here on all epochs are alike.
                return self.count % final.batch_size > 0 and steps >= self.steps_per_epoch
            made = min(steps, len(stretch.consumed))
            if stretch.offset + made * stretch.batch_size > self.count:
                return True
            steps -= made
            if not steps:
                return False
        return False

    def stretches(self, consumed: int) -> Iterator[Stretch]:
        """Yield the steps from `consumed` on, at most _STRETCH positions of this rank at a time."""
        while True:
            consumed = self._settle(consumed)
            epoch, offset = divmod(consumed, self.count)
            if self._max_epochs is not None and epoch >= self._max_epochs:
                return
            size, _, stage_end = self._stage(consumed)
            left = min(self.count - offset, stage_end - consumed)
            steps = max(1, min(int(left // size), _STRETCH // self._share(size)))
            ends = (min(offset + n * size, self.count) for n in range(1, steps + 1))
            states = [self._settle(consumed - offset + end) for end in ends]
            yield Stretch(epoch, offset, states, size)
            consumed = states[-1]

    def positions(self, stretch: Stretch) -> tuple[Int64s, NDArray[np.bool_]]:
        """Return this rank's positions, and which do not only fill up: (steps, share) each."""
        size = stretch.batch_size
        first = stretch.offset + self._dp_rank * (size // self._dp_size)
        steps = np.arange(len(stretch.consumed))[:, None] * size
        positions = first + steps + np.arange(self._share(size))
        return np.minimum(positions, self.count - 1), positions < self.count

    def _share(self, batch_size: int) -> int:
        return self._dp_count * (batch_size // self._dp_size)

    def _stage(self, consumed: int) -> _Stage:
        return next(stage for stage in self._stages if consumed < stage.end)

    def _settle(self, consumed: int) -> int:
        """Return the state after a tail that is too short for a batch, if `consumed` is in one."""
        left = self.count - consumed % self.count
        too_short = self._drops and left < self._stage(consumed).batch_size
        return consumed + left if too_short else consumed

    def _steps_in(self, samples: int, size: int) -> int:
        """Return the steps of `samples` samples at the end of an epoch."""
        whole, rest = divmod(samples, size)
        return whole + (rest > 0 and not self._drops)

    def _after(self, steps: int, begin: int, size: int) -> int:
        """Return the state after so many steps of one size, which begin at the state `begin`."""
        left = self.count - begin % self.count
        here = self._steps_in(left, size)
        if steps < here:
            return begin + steps * size
        epochs, rest = divmod(steps - here, self._steps_in(self.count, size))
        return begin + left + epochs * self.count + rest * size

    def _between(self, begin: int, end: int, size: int) -> int:
        """Return the steps of one size from the state `begin` to `end`, which they may pass."""
        (first, offset), (last, rest) = divmod(begin, self.count), divmod(end, self.count)
        if first == last:
            return -(-(rest - offset) // size)
        whole = (last - first - 1) * self._steps_in(self.count, size)
        return self._steps_in(self.count - offset, size) + whole + -(-rest // size)


def _check(count: int, batch: int, dp_rank: int, dp_size: int, tail: str) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"data-parallel rank {dp_rank} of {dp_size}: it is 0 to {dp_size - 1}")
    if batch < 1 or batch % dp_size:
        raise ConfigError(
            f"global batch size {batch} cannot be divided among {dp_size} data-parallel ranks; "
            f"it must be a positive multiple of {dp_size}"
        )
    if batch > count and tail == "drop":
        raise DataError(
            f"global batch size {batch} is larger than the data set, {count} samples: no batch "
            "is ever full. Use a smaller one, or tail 'pad'"
        )


class StepPlan(NamedTuple):
    """Positions in the epoch, samples, and which of them count: (steps, share) each."""

    positions: Int64s
    samples: Int64s
    mask: NDArray[np.bool_]


class StepGroup(NamedTuple):
    """Successive steps of a stretch."""

    epoch: int
    planned: Future[StepPlan]  # of the whole stretch
    first: int  # the place of the first step in the stretch
    consumed: list[int]  # the loader's state after each step
    batch_size: int  # samples of a step over all ranks, with those that only fill up

    @property
    def plan(self) -> StepPlan:
        """The plan of these steps; it waits for the planning thread."""
        chosen = slice(self.first, self.first + len(self.consumed))
        positions, samples, mask = self.planned.result()
        return StepPlan(positions[chosen], samples[chosen], mask[chosen])

    def part(self, start: int, stop: int) -> "StepGroup":
        """Return the steps `start` to `stop`, counted from the first one here."""
        return self._replace(first=self.first + start, consumed=self.consumed[start:stop])


class Step(NamedTuple):
    """One step of a group; `number` counts from the first one there."""

    group: StepGroup
    number: int

    @property
    def consumed(self) -> int:
        """The loader's state after it."""
        return self.group.consumed[self.number]

    @property
    def positions(self) -> Int64s:
        """Its positions in the epoch, int64 (share,)."""
        chosen: Int64s = self.group.plan.positions[self.number]
        return chosen

    @property
    def samples(self) -> Int64s:
        """Indices of its samples, without those that only fill up the last batch: int64 (n,)."""
        _, samples, mask = self.group.plan
        chosen: Int64s = samples[self.number][mask[self.number]]
        return chosen
