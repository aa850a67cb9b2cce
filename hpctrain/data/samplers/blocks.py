"""Shuffling by blocks: reads in runs, as file systems like them, mixed in a window of blocks.

    index space      |  block 0  |  block 1  |  block 2  |  block 3  | 4 |   count 36, block_size 8
    permuted         |  block 3  |  block 1  | 4 |  block 0  |  block 2  |   in each epoch anew
    windows          |      window 0         |   window 1    | window 2  |   window=2
    positions        0                      16              28          36   in each, shuffled

A reader holds `window` blocks of `block_size` samples and reads each block once an epoch, as one
run. Every epoch is an exact permutation of [0, count), a pure function of the position, in O(1)
memory: the last block is shorter, lands anywhere, and what comes after it moves up by what it
lacks. Blocks are of the index space, and may lie across shards.

Samples of a batch come from at most `window` blocks: tests/benchmarks/test_order_speed.py measures
what that costs beside a full shuffle. Neighbours on disk that resemble each other (sorted by
class, frames of a video) want small blocks and many of them.

Many ranks that take consecutive slices of one batch would all read all blocks of its window.
`Lanes` gives each a window of its own, still the same batches at any number of ranks.

    >>> order = BlockOrder(10**9, seed=0, block_size=1024, window=64)
    >>> Lanes(order, lanes=128, run=32)         # global batch 4096 = 128 lanes x 32 samples
"""

import numpy as np

from hpctrain.data.samplers.order import Order, check_positions
from hpctrain.data.samplers.permutation import groups, make_key, permute_each
from hpctrain.data.types import Int64s
from hpctrain.errors import ConfigError


class BlockOrder:
    """A permutation of [0, count) for each epoch that visits blocks, and its inverse.

    Args:
        count: Number of samples, 1 to 2^62.
        seed: Any integer; taken modulo 2^64.
        block_size: Samples in a block, 1 or more.
        window: Blocks that are mixed, 1 or more.

    Attributes:
        blocks_per_epoch: Number of blocks.

    Raises:
        ConfigError: `block_size` or `window` is less than 1.
        DataError: `count` is out of range.
    """

    def __init__(self, count: int, seed: int, block_size: int, window: int) -> None:
        if block_size < 1 or window < 1:
            raise ConfigError(f"block_size {block_size} and window {window}: they are 1 or more")
        self.blocks_per_epoch = -(-count // block_size)
        self._blocks = Order(self.blocks_per_epoch, seed)
        self.count, self.seed, self.block_size = count, seed, block_size
        self.window = min(window, self.blocks_per_epoch)
        self._length = self.window * block_size  # of a window, in samples
        self._lacks = self.blocks_per_epoch * block_size - count  # the last block, to be whole
        self._short = (-1, -1)  # an epoch, and the slot of its short block

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        windows, offsets = self._locate(epoch, check_positions(positions, self.count))
        places = self._mix(epoch, windows, offsets, inverse=False) + windows * self._length
        if self._lacks:  # in the window of the short block, what comes after it
            slot = self._short_slot(epoch)
            end = (slot + 1) * self.block_size - self._lacks
            places[(windows == slot // self.window) & (places >= end)] += self._lacks
        slots, within = np.divmod(places, self.block_size)
        return self._blocks_at(epoch, slots) * self.block_size + within

    def inverse(self, epoch: int, indices: Int64s) -> Int64s:
        """Return the positions of the samples `indices` in `epoch`."""
        blocks, within = np.divmod(check_positions(indices, self.count), self.block_size)
        slots = self._blocks.inverse(epoch, blocks)
        windows, slot = slots // self.window, self._short_slot(epoch)
        offsets = slots * self.block_size + within - windows * self._length
        offsets[(windows == slot // self.window) & (slots > slot)] -= self._lacks
        positions = self._mix(epoch, windows, offsets, inverse=True) + windows * self._length
        positions[windows > slot // self.window] -= self._lacks
        return positions

    def window_of(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the windows in which `positions` of `epoch` lie, counted from 0."""
        return self._locate(epoch, check_positions(positions, self.count))[0]

    def blocks(self, epoch: int, positions: Int64s) -> Int64s:
        """Return what these positions need, to be read ahead, and what comes after it.

        The next window is read while samples are drawn from this one: it is needed at once.

        Returns:
            Ranges of indices [first, end), int64 (k, 2): window by window in the order of need,
            in a window in the order of the disk.
        """
        windows = _in_order(self.window_of(epoch, positions))
        last = (self.blocks_per_epoch - 1) // self.window
        return self.ranges(epoch, _in_order(np.append(windows, np.minimum(windows + 1, last))))

    def ranges(self, epoch: int, windows: Int64s) -> Int64s:
        """Return the ranges of indices of these windows; see `blocks`."""
        none = self.blocks_per_epoch  # in place of what the last window lacks
        slots = windows[:, None] * self.window + np.arange(self.window)
        found = self._blocks(epoch, np.minimum(slots, none - 1).ravel()).reshape(slots.shape)
        blocks = np.sort(np.where(slots < none, found, none), axis=1).ravel()
        starts = blocks[blocks < none] * self.block_size
        return np.stack([starts, np.minimum(starts + self.block_size, self.count)], axis=1)

    def _locate(self, epoch: int, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The windows, and the offsets in them."""
        if self._lacks:
            after = (self._short_slot(epoch) // self.window + 1) * self._length
            positions = positions + self._lacks * (positions >= after - self._lacks)
        windows, offsets = np.divmod(positions, self._length)
        return windows, offsets

    def _mix(self, epoch: int, windows: Int64s, offsets: Int64s, *, inverse: bool) -> Int64s:
        """Each offset, by the permutation of its window."""
        key = make_key(self.seed, epoch, self.count, self.block_size, self.window)
        sizes = np.minimum(
            self._length, self.blocks_per_epoch * self.block_size - windows * self._length
        )
        sizes[windows == self._short_slot(epoch) // self.window] -= self._lacks
        mixed = np.empty_like(offsets)
        for size, rows in groups(sizes):  # all the same but two
            mixed[rows] = permute_each(size, key, windows[rows], offsets[rows], inverse=inverse)
        return mixed

    def _blocks_at(self, epoch: int, slots: Int64s) -> Int64s:
        low, high = int(slots.min(initial=self.count)), int(slots.max(initial=0))
        if high - low >= slots.size:
            return self._blocks(epoch, slots)
        return self._blocks(epoch, np.arange(low, high + 1))[slots - low]

    def _short_slot(self, epoch: int) -> int:
        """Where the epoch has the last block, which is the short one."""
        known, slot = self._short
        if known != epoch:
            slot = int(self._blocks.inverse(epoch, np.array([self.blocks_per_epoch - 1]))[0])
            self._short = (epoch, slot)
        return slot


class Lanes:
    """Deals the positions out to lanes, each of which goes through a part of `sampler` alone.

        positions        0 1 2 3 4 5 6 7 8 9 …          lanes=2, run=3, sampler.count = 26
        of the sampler   0 1 2 12 13 14 3 4 5 15 …      lane 0: 0 to 11, lane 1: 12 to 23
                                                        at the end of the epoch: 24, 25

    With global_batch_size = lanes * run, rank r of n reads lanes / n lanes and nothing else: over
    blocks, its own windows. Other batch sizes and numbers of ranks get the same sequence, and
    read windows together. Still each epoch is what `sampler` gives, each position once.

    Args:
        sampler: The order whose windows are dealt out.
        lanes: A multiple of every number of ranks that will be used; 1 or more.
        run: Positions that a lane gets at a time, 1 or more.

    Raises:
        ConfigError: `lanes` or `run` is less than 1.
    """

    def __init__(self, sampler: BlockOrder, lanes: int, run: int) -> None:
        if lanes < 1 or run < 1:
            raise ConfigError(f"lanes {lanes} and run {run}: they are 1 or more")
        self.sampler, self.lanes, self.run = sampler, lanes, run
        self.count = sampler.count
        self._rounds = self.count // (lanes * run)

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`; see `Sampler`."""
        return self.sampler(epoch, self.inner(positions))

    def inner(self, positions: Int64s) -> Int64s:
        """Return the positions in `sampler` of these: a permutation of [0, count)."""
        positions = check_positions(positions, self.count)
        turns, within = np.divmod(positions, self.run)
        rounds, lanes = np.divmod(turns, self.lanes)
        inner = (lanes * self._rounds + rounds) * self.run + within
        return np.where(rounds < self._rounds, inner, positions)

    def blocks(self, epoch: int, positions: Int64s) -> Int64s:
        """Return what these positions need; see `BlockOrder.blocks`."""
        return self.sampler.blocks(epoch, self.inner(positions))


def _in_order(values: Int64s) -> Int64s:
    """Each value once, in the order of the first."""
    unique, first = np.unique(values, return_index=True)
    return unique[np.argsort(first)]
