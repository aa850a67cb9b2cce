"""Shuffling by blocks: reads long runs, as file systems like them, and mixes a window of blocks.

    index space      |  block 0  |  block 1  |  block 2  |  block 3  | 4 |   count 36, block_size 8
    permuted         |  block 3  |  block 1  | 4 |  block 0  |  block 2  |   differs per epoch
    windows          |      window 0         |   window 1    | window 2  |   window=2
    positions        0                      16              28          36   shuffled per window

A reader holds `window` blocks of `block_size` samples and reads each block once per epoch, as one
run. Every epoch is an exact permutation of [0, count), a pure function of the position in O(1)
memory. The last block is shorter. It may land anywhere, and the positions after it move up by the
samples that it lacks. Blocks divide the index space, so a block may span several shards.

The samples of a batch come from at most `window` blocks. If neighbours on disk resemble each other
(sorted by class, frames of a video), use small blocks and many of them.

    >>> order = BlockOrder(10**9, seed=0, block_size=1024, window=64)
"""

import numpy as np

from hpctrain.data.samplers.order import Order, check_positions
from hpctrain.data.samplers.permutation import groups, make_key, permute_each
from hpctrain.data.shards.types import Int64s


class BlockOrder:
    """A permutation of [0, count) per epoch that mixes `window` blocks; count is at most 2^62."""

    def __init__(self, count: int, seed: int, block_size: int, window: int) -> None:
        self.blocks_per_epoch = -(-count // block_size)
        self._blocks = Order(self.blocks_per_epoch, seed)
        self.count, self.seed, self.block_size = count, seed, block_size
        self.window = min(window, self.blocks_per_epoch)
        self._length = self.window * block_size  # samples of a window
        # Samples that the last block lacks.
        self._lacks = self.blocks_per_epoch * block_size - count
        self._short = (-1, -1)  # last computed: an epoch and the slot of its short block

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        windows, offsets = self._locate(epoch, check_positions(positions, self.count))
        places = self._mix(epoch, windows, offsets) + windows * self._length
        if self._lacks:  # skip the missing samples in the window of the short block
            slot = self._short_slot(epoch)
            end = (slot + 1) * self.block_size - self._lacks
            places[(windows == slot // self.window) & (places >= end)] += self._lacks
        slots, within = np.divmod(places, self.block_size)
        return self._blocks(epoch, slots) * self.block_size + within

    def blocks(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the ranges of indices [first, end), (k, 2), to read for these positions, in order.

        The window after them is among them: it is needed all at once.
        """
        windows = _in_order(self._locate(epoch, check_positions(positions, self.count))[0])
        last = (self.blocks_per_epoch - 1) // self.window
        return self.ranges(epoch, _in_order(np.append(windows, np.minimum(windows + 1, last))))

    def ranges(self, epoch: int, windows: Int64s) -> Int64s:
        """Return the ranges of indices of these windows; see `blocks`."""
        none = self.blocks_per_epoch  # stands for the blocks that the last window lacks
        slots = windows[:, None] * self.window + np.arange(self.window)
        found = self._blocks(epoch, np.minimum(slots, none - 1).ravel()).reshape(slots.shape)
        blocks = np.sort(np.where(slots < none, found, none), axis=1).ravel()
        starts = blocks[blocks < none] * self.block_size
        return np.stack([starts, np.minimum(starts + self.block_size, self.count)], axis=1)

    def _locate(self, epoch: int, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the window of each position, and its place within the window."""
        if self._lacks:
            after = (self._short_slot(epoch) // self.window + 1) * self._length
            positions = positions + self._lacks * (positions >= after - self._lacks)
        windows, offsets = np.divmod(positions, self._length)
        return windows, offsets

    def _mix(self, epoch: int, windows: Int64s, offsets: Int64s) -> Int64s:
        """Map each place within a window by the permutation of that window."""
        key = make_key(self.seed, epoch, self.count, self.block_size, self.window)
        sizes = np.minimum(
            self._length, self.blocks_per_epoch * self.block_size - windows * self._length
        )
        sizes[windows == self._short_slot(epoch) // self.window] -= self._lacks
        mixed = np.empty_like(offsets)
        for size, rows in groups(sizes):  # all windows but two have the same size
            mixed[rows] = permute_each(size, key, windows[rows], offsets[rows])
        return mixed

    def _short_slot(self, epoch: int) -> int:
        """Return where this epoch has the last block, which is the short one."""
        computed_for, slot = self._short
        if computed_for != epoch:
            slot = int(self._blocks.inverse(epoch, np.array([self.blocks_per_epoch - 1]))[0])
            self._short = (epoch, slot)
        return slot


def _in_order(values: Int64s) -> Int64s:
    """Return each distinct value once, in the order of its first occurrence."""
    unique, first = np.unique(values, return_index=True)
    return unique[np.argsort(first)]
