"""Random choices for the samples of a batch: pure functions of (seed, epoch, position, draw).

A sample gets the same crop and the same flip on every device, with every number of ranks, and
after every restart: each number is a hash (`hpctrain.data.samplers.permutation`) of the sample's
position and of the number of draws before it in the batch.

    >>> draws = Draws(seed=0, epoch=3, positions=np.arange(128, 192))
    >>> draws.uniform() < 0.5             # bool (64,), for the first transform
    >>> draws.integers(9)                 # int64 (64,), 0 to 8; other numbers than before
"""

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.samplers.permutation import hashes, make_key, scramble
from hpctrain.data.shards.types import Int64s

_DRAWS = 0x6472617773  # "draws": so that the keys differ from those of the order with the same seed


class Draws:
    """The random numbers of one batch, whose samples have the `positions` (b,) in the epoch.

    Each call draws other numbers; `drawn` counts the calls.
    """

    def __init__(self, seed: int, epoch: int, positions: Int64s) -> None:
        self._key = _DRAWS, seed, epoch
        self._positions = np.asarray(positions, np.int64)
        self.drawn = 0

    def __len__(self) -> int:
        return len(self._positions)

    def uniform(self) -> torch.Tensor:
        """Return float32 (b,) in [0, 1), on the CPU."""
        bits = (self._next() >> np.uint64(40)).astype(np.float32)  # a float32 holds 24 bits
        return torch.from_numpy(bits * np.float32(2**-24))

    def integers(self, high: int) -> torch.Tensor:
        """Return int64 (b,) in [0, high), high <= 2^31, on the CPU."""
        bits = (self._next() >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)
        return torch.from_numpy(bits.view(np.int64))

    def _next(self) -> NDArray[np.uint64]:
        """Return 64 random bits for each sample."""
        key = make_key(*self._key, self.drawn)
        self.drawn += 1
        return scramble(hashes(key, self._positions) ^ np.uint64(key))
