"""Which positions each step has, and which of them this rank takes: arithmetic, without data.

    count 10, global batch 4, 2 ranks          epoch 0              epoch 1
    positions                                  0 1 2 3 4 5 6 7 8 9  0 1 2 3 …
    step 0: rank 0 takes 0 1, rank 1 2 3       └─0─┘ └─1─┘
    step 1: consumed 4 → 8                             └─0─┘ └─1─┘
    tail "drop": 8 9 are left out, consumed becomes 10: the next epoch begins
    tail "pad":  a third step 8 9 8' 8', whose last two are masked, then the next epoch

`consumed` counts samples over all ranks and epochs. It is the whole state: a run can continue from
it with any number of ranks and any batch size. Every rank makes the same number of steps.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.types import Int64s

Tail = Literal["drop", "pad"]

_STRETCH = 16_384  # positions of a rank that are planned at once


class Stretch(NamedTuple):
    """Successive steps of one epoch: where they begin in it, and `consumed` after each."""

    epoch: int
    offset: int
    consumed: list[int]


class Steps:
    """The steps of one rank.

    Args:
        count: Positions in an epoch.
        global_batch_size: Samples of one step, over all ranks.
        dp_rank: This rank among the `dp_size` that divide the data.
        dp_size: Data-parallel ranks.
        dp_count: This rank takes the samples of so many ranks, from dp_rank on.
        tail: An incomplete last batch of an epoch is left out ("drop") or filled up ("pad").
        max_epochs: There are steps for so many epochs, counted from the state 0; None: for all.

    Attributes:
        share: Samples of one step on this rank.
        steps_per_epoch: Steps of a whole epoch.

    Raises:
        ConfigError: Sizes or ranks do not fit together.
        DataError: There are fewer samples than one batch has (tail "drop").
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
    ) -> None:
        _check(count, global_batch_size, dp_rank, dp_size, tail, max_epochs)
        self.count, self.batch_size = count, global_batch_size
        self._drops, self._max_epochs = tail == "drop", max_epochs
        self._first = dp_rank * (global_batch_size // dp_size)
        self.share = dp_count * (global_batch_size // dp_size)
        whole, rest = divmod(count, global_batch_size)
        self.steps_per_epoch = whole + (rest > 0 and tail == "pad")

    def stretches(self, consumed: int) -> Iterator[Stretch]:
        """Yield the steps from `consumed` on, at most _STRETCH positions of this rank at a time."""
        while True:
            consumed = self._settle(consumed)
            epoch, offset = divmod(consumed, self.count)
            if self._max_epochs is not None and epoch >= self._max_epochs:
                return
            whole = (self.count - offset) // self.batch_size
            steps = max(1, min(whole, _STRETCH // self.share))
            ends = (min(offset + n * self.batch_size, self.count) for n in range(1, steps + 1))
            stretch = Stretch(
                epoch, offset, [self._settle(consumed - offset + end) for end in ends]
            )
            yield stretch
            consumed = stretch.consumed[-1]

    def positions(self, stretch: Stretch) -> tuple[Int64s, NDArray[np.bool_]]:
        """Return this rank's positions, int64, and whether they count: (steps, share) each.

        A position that does not count repeats the last one, to fill up the tail.
        """
        first = stretch.offset + self._first
        steps = np.arange(len(stretch.consumed))[:, None] * self.batch_size
        positions = first + steps + np.arange(self.share)
        return np.minimum(positions, self.count - 1), positions < self.count

    def _settle(self, consumed: int) -> int:
        """Return the state after a tail that is too short for a batch, if `consumed` is in one."""
        left = self.count - consumed % self.count
        return consumed + left if self._drops and left < self.batch_size else consumed


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
