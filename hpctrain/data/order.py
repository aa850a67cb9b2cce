"""The order of samples: a pure function of (seed, epoch, position), in O(1) memory.

`torch.randperm(5e8)` takes 37 s and 4 GB on every rank, so no permutation is materialised: each
position is enciphered. A Feistel network with a keyed round function permutes [0, 2^bits)
(Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
SIAM J. Comput. 17(2), 1988), and cycle walking restricts it to [0, count): whatever falls
outside is enciphered again (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002). 2^bits < 2 count, so that is less than two rounds on average. The keys of an epoch come
from splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Up to SMALL samples, where a cipher over a handful of bits is a poor shuffle, the
order is that of the samples' 64-bit hashes: a table of at most 32 KB.

    >>> order = Order(count=10**10, seed=0)
    >>> order(epoch=3, positions=np.arange(4))      # the first four samples of epoch 3

The values are fixed for ever: a resumed run depends on them. tests/data/test_order.py holds
golden ones.
"""

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

SMALL = 4096
ROUNDS = 6
MAX_COUNT = 2**62
BLOCK = 16_384  # positions enciphered at a time: the temporaries stay in the L2 cache

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFT = np.uint64(32)


class Sampler(Protocol):
    """Which sample stands at a position: a pure function, the same on every rank.

    So the global batch of a step, which is that of its positions, is the same whatever the
    ranks, workers and restarts. The time of a call is in its positions: ask for thousands.
    """

    @property
    def count(self) -> int:
        """Positions in one epoch."""

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`.

        Args:
            epoch: 0 or more.
            positions: int64 (n,), each in [0, count), in any order.

        Returns:
            Indices of samples, int64 (n,).

        Raises:
            IndexError: A position is out of range.
        """


class Order:
    """A permutation of [0, count) for each epoch, and its inverse.

    Args:
        count: Number of samples, 1 to 2^62.
        seed: Any integer; taken modulo 2^64.
        shuffle: False is the identity.

    Raises:
        DataError: `count` is out of range.
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise DataError(f"an order needs 1 to 2^62 samples, not {count}")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        bits = (count - 1).bit_length()
        self._left, self._right = bits - bits // 2, bits // 2

    def __call__(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the samples at `positions` of `epoch`.

        Args:
            epoch: 0 or more.
            positions: int64 (n,), each in [0, count).

        Returns:
            Sample indices, int64 (n,), each in [0, count).

        Raises:
            IndexError: A position is out of range.
        """
        return self._map(epoch, positions, inverse=False)

    def inverse(self, epoch: int, indices: Int64s) -> Int64s:
        """Return the positions of the samples `indices` in `epoch`; see `__call__`."""
        return self._map(epoch, indices, inverse=True)

    def _map(self, epoch: int, values: Int64s, *, inverse: bool) -> Int64s:
        values = np.asarray(values, dtype=np.int64)
        if values.size and not (values.min() >= 0 and values.max() < self.count):
            raise IndexError(f"positions {values.min()} to {values.max()} of {self.count} samples")
        if not self.shuffle:
            return values.copy()
        key = _key(self.seed, epoch, self.count)
        if self.count <= SMALL:
            return _table(self.count, key)[int(inverse)][values]
        keys = _round_keys(key)
        result = np.empty_like(values)
        for start in range(0, values.size, BLOCK):
            block = slice(start, start + BLOCK)
            result[block] = self._walk(values[block].view(np.uint64), keys, inverse)
        return result

    def _walk(self, values: UInt64s, keys: UInt64s, inverse: bool) -> Int64s:
        cipher = self._decipher if inverse else self._encipher
        values = cipher(values, keys)
        outside = np.flatnonzero(values >= self.count)
        while outside.size:  # ends: a cycle comes back to where it started, which is inside
            values[outside] = cipher(values[outside], keys)
            outside = outside[values[outside] >= self.count]
        return values.view(np.int64)

    # The halves have `a` and `b` bits, and change places each round; ROUNDS is even, so that
    # they end where they began.

    def _encipher(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        a, b = self._left, self._right
        left, right = values >> np.uint64(b), values & np.uint64((1 << b) - 1)
        for key in keys:
            left ^= _round(right, key, a)
            left, right, a, b = right, left, b, a
        return (left << np.uint64(b)) | right

    def _decipher(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        a, b = self._left, self._right
        left, right = values >> np.uint64(b), values & np.uint64((1 << b) - 1)
        for key in keys[::-1]:
            left, right, a, b = right, left, b, a
            left ^= _round(right, key, a)
        return (left << np.uint64(b)) | right


def _round(half: UInt64s, key: np.uint64, bits: int) -> UInt64s:
    """The keyed round function: the top `bits` of a 64-bit hash."""
    x = half + key
    x *= np.uint64(_MIX_1)
    x ^= x >> _SHIFT
    x *= np.uint64(_MIX_2)
    x >>= np.uint64(64 - bits)
    return x


def _mix(x: int) -> int:
    """splitmix64's finaliser, a bijection of 64-bit integers."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, epoch: int, count: int) -> int:
    """One key of 64 bits; nested, so that (seed + 1, epoch - 1) is another one."""
    key = 0
    for word in (seed, epoch, count):
        key = _mix(key + (word & _MASK) + _GAMMA)
    return key


def _round_keys(key: int) -> UInt64s:
    return np.array([_mix(key + i * _GAMMA) for i in range(1, ROUNDS + 1)], dtype=np.uint64)


@lru_cache(maxsize=16)
def _table(count: int, key: int) -> tuple[Int64s, Int64s]:
    """The order of a small data set, and its inverse. The hashes of one key are all different."""
    hashes = np.array([_mix(key + i * _GAMMA) for i in range(1, count + 1)], dtype=np.uint64)
    forward = np.argsort(hashes, kind="stable").astype(np.int64)
    return forward, np.argsort(forward, kind="stable").astype(np.int64)
