"""Plans of what each step reads, made before it is read: which samples, and which of them count.

A stretch of many steps is planned at once, and read in groups of steps.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.loading.steps import Steps, Stretch
from hpctrain.data.samplers.order import Sampler
from hpctrain.data.shards.types import Int64s
from hpctrain.data.source import InBlocks, Source


class _Plan(NamedTuple):
    """Positions in the epoch, samples, and which of them count: (steps, share) each."""

    positions: Int64s
    samples: Int64s
    mask: NDArray[np.bool_]


class StepGroup(NamedTuple):
    """Successive steps of a stretch."""

    epoch: int
    planned: Future[_Plan]  # of the whole stretch
    first: int  # the place of the first step in the stretch
    consumed: list[int]  # the loader's state after each step
    batch_size: int  # samples of a step over all ranks, with those that only fill up

    @property
    def plan(self) -> _Plan:
        """The plan of these steps; it waits for the planning thread."""
        chosen = slice(self.first, self.first + len(self.consumed))
        positions, samples, mask = self.planned.result()
        return _Plan(positions[chosen], samples[chosen], mask[chosen])

    def part(self, start: int, stop: int) -> "StepGroup":
        """Return the steps `start` to `stop`, counted from the first one here."""
        return self._replace(first=self.first + start, consumed=self.consumed[start:stop])


class Step(NamedTuple):
    """One step of a group; `number` counts from the first one there."""

    group: StepGroup
    number: int

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


class Planner:
    """Plans the steps of a loader, and tells the source what will be read."""

    def __init__(self, steps: Steps, sampler: Sampler, source: Source) -> None:
        self._steps, self._sampler, self._source = steps, sampler, source
        # Checked once and not for each group: a check against a protocol is slow.
        self.in_blocks = sampler if isinstance(sampler, InBlocks) else None

    def stretches(self, consumed: int, planning: Executor) -> Iterator[StepGroup]:
        """Yield the stretches after the state `consumed`, while `planning` plans the next one."""
        current: StepGroup | None = None
        for stretch in self._steps.stretches(consumed):
            following = self._planned(stretch, planning)
            if current is not None:
                yield current
            current = following
        if current is not None:
            yield current

    def read_ahead(self, group: StepGroup, planning: Executor) -> None:
        """Let `planning` ask the source to read the group's blocks ahead; they are `in_blocks`."""
        sampler = self.in_blocks
        assert sampler is not None
        planning.submit(
            lambda: self._source.read_ahead(
                sampler.blocks(group.epoch, group.plan.positions.reshape(-1))
            )
        )

    def _planned(self, stretch: Stretch, planning: Executor) -> StepGroup:
        plan = planning.submit(self._plan, stretch)
        planning.submit(lambda: self._source.prepare(plan.result().samples.reshape(-1)))
        return StepGroup(stretch.epoch, plan, 0, stretch.consumed, stretch.batch_size)

    def _plan(self, stretch: Stretch) -> _Plan:
        positions, mask = self._steps.positions(stretch)
        samples = self._sampler(stretch.epoch, positions.reshape(-1))
        return _Plan(positions, samples.reshape(positions.shape), mask)
