"""What each step reads, found out a stretch ahead: which samples, and which of them count."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.collate import Masks
from hpctrain.data.samplers.order import Sampler
from hpctrain.data.source import InBlocks, Prepares, ReadsAhead, Source
from hpctrain.data.steps import Steps, Stretch
from hpctrain.data.types import Int64s


class Plan(NamedTuple):
    """The steps of a stretch on this rank: (steps, share), and (share,) for each."""

    positions: Int64s
    samples: Int64s
    masks: Masks


class Group(NamedTuple):
    """Steps of a stretch that are read together, and the state `consumed` after each."""

    epoch: int
    planned: Future[Plan]
    first: int
    consumed: list[int]

    @property
    def plan(self) -> Plan:
        """Of these steps alone."""
        chosen = slice(self.first, self.first + len(self.consumed))
        positions, samples, masks = self.planned.result()
        return Plan(positions[chosen], samples[chosen], masks[chosen])


class Planner:
    """Plans the steps of a loader.

    Args:
        steps: Which positions each step has.
        sampler: Which sample stands at a position.
        source: Told what is read next, if it likes to know.
        masks: From bool (steps, share) to what the consumer gets.
    """

    def __init__(
        self,
        steps: Steps,
        sampler: Sampler,
        source: Source,
        masks: Callable[[NDArray[np.bool_]], Masks],
    ) -> None:
        self._steps, self._sampler, self._source, self._masks = steps, sampler, source, masks

    def groups(
        self, consumed: int, thread: Executor, ahead: bool, size: Callable[[], int]
    ) -> Iterator[Group]:
        """Steps from the state `consumed` on, with the next stretch's samples on their way.

        Args:
            consumed: Samples, over all ranks and epochs.
            thread: Where it is done.
            ahead: The source is told what is read next.
            size: Steps of the next group, at most; the first ones are smaller, for the first
                batch is not to wait for others.
        """
        stretches = self._steps.stretches(consumed)
        planned = ((stretch, self._planned(stretch, thread, ahead)) for stretch in stretches)
        current = next(planned, None)
        limit = 1
        while current is not None:
            stretch, plan = current
            current = None
            first = 0
            while first < len(stretch.consumed):
                most = size()
                last = first + min(limit, most)
                group = Group(stretch.epoch, plan, first, stretch.consumed[first:last])
                if ahead:
                    self._read_ahead(group, thread)
                if not first:  # the first group goes ahead
                    current = next(planned, None)
                yield group
                first, limit = last, min(2 * limit, most)

    def _planned(self, stretch: Stretch, thread: Executor, ahead: bool) -> Future[Plan]:
        plan = thread.submit(self._plan, stretch)
        if ahead and isinstance(source := self._source, Prepares):
            thread.submit(lambda: source.prepare(plan.result().samples.reshape(-1)))
        return plan

    def _read_ahead(self, group: Group, thread: Executor) -> None:
        """Have the blocks of a group read, and no more: what is not used soon would be lost."""
        if isinstance(sampler := self._sampler, InBlocks) and isinstance(
            source := self._source, ReadsAhead
        ):
            thread.submit(
                lambda: source.read_ahead(
                    sampler.blocks(group.epoch, group.plan.positions.reshape(-1))
                )
            )

    def _plan(self, stretch: Stretch) -> Plan:
        positions, mask = self._steps.positions(stretch)
        samples = self._sampler(stretch.epoch, positions.reshape(-1))
        return Plan(positions, samples.reshape(positions.shape), self._masks(mask))
