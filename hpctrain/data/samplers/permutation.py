"""Permutations of [0, count), one per 64-bit key, computed value by value.

A Feistel network with a keyed round function permutes [0, 2^bits) (Luby and Rackoff, "How to
construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2), 1988).
Cycle walking restricts it to [0, count): a value outside is mapped again (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). Because 2^bits < 2 count, a value is mapped
less than twice on average. Keys and hashes come from splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014). Up to SMALL, where a network over few bits
shuffles poorly, the permutation is the order of 64-bit hashes: a table of at most 16 KB.

    >>> permute(10**10, make_key(0, 3), np.arange(4))      # four values in [0, 10^10)

The values never change, because resumed runs depend on them.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.shards.types import Int64s

_UInt64s = NDArray[np.uint64]

SMALL = 4096
ROUNDS = 6
MAX_COUNT = 2**62
BLOCK = 16_384  # values mapped at a time: the temporaries stay in the L2 cache
_TABLES = 256  # kept tables of small permutations: at most 4 MB
ROWS = 2**18  # hashes sorted at a time

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Arrays, because converting a scalar takes a third of the time of a small call.
_MULTIPLY_1, _MULTIPLY_2 = np.array(_MIX_1, np.uint64), np.array(_MIX_2, np.uint64)
_SHIFT = np.array(32, np.uint64)
_SHIFTS = [np.array(64 - bits, np.uint64) for bits in range(64)]


def make_key(*words: int) -> int:
    """Return a 64-bit key. The words are hashed one after the other, so their order matters."""
    key = 0
    for word in words:
        key = _mix(key + (word & _MASK) + _GAMMA)
    return key


def hashes(key: int | _UInt64s, counters: Int64s) -> _UInt64s:
    """Return outputs of the splitmix64 stream that starts at `key`, uint64: all are different.

    Counters are 0 or more; there may be a key for each, to which they are broadcast.
    """
    start = key if isinstance(key, np.ndarray) else np.uint64(key)
    return scramble((counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + start)


def scramble(x: _UInt64s) -> _UInt64s:
    """Apply the finaliser of splitmix64, a bijection of 64-bit integers, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x


def permute(count: int, key: int, values: Int64s, *, inverse: bool = False) -> Int64s:
    """Map values, each in [0, count), by the permutation of `key`, or by its inverse."""
    if count <= SMALL:
        return _table(count, key)[int(inverse)][values].astype(np.int64)
    keys = [np.array(_mix(key + i * _GAMMA), np.uint64) for i in range(1, ROUNDS + 1)]
    result = _cipher(count, keys, values.view(np.uint64), inverse)
    outside = np.flatnonzero(result >= np.uint64(count))
    walking = result[outside]
    while outside.size:  # ends, because a cycle returns to its start, which is inside
        walking = _cipher(count, keys, walking, inverse)
        result[outside] = walking
        still = np.flatnonzero(walking >= np.uint64(count))
        outside, walking = outside[still], walking[still]
    return result.view(np.int64)


def permute_each(count: int, key: int, numbers: Int64s, values: Int64s) -> Int64s:
    """Map each value by its own permutation: number `numbers[i]`, 0 or more, under `key`.

    It is fast if there are few different numbers, or if `count` is small: then many permutations
    are sorted together.
    """
    result = np.empty_like(values)
    if count > SMALL:
        for number, rows in groups(numbers):
            own = int(hashes(key, np.array([number]))[0])
            result[rows] = permute(count, own, values[rows])
        return result
    chosen, which = np.unique(numbers, return_inverse=True)
    step = max(1, ROWS // count)
    for part, rows in groups(which // step):
        keys = hashes(key, chosen[part * step : (part + 1) * step])
        tables = np.argsort(hashes(keys[:, None], np.arange(count)), axis=1)
        result[rows] = tables[which[rows] - part * step, values[rows]]
    return result


def groups(labels: Int64s) -> list[tuple[int, slice | Int64s]]:
    """Return each distinct label, in ascending order, with its rows in their original order."""
    if not labels.size:
        return []
    low, high = int(labels.min()), int(labels.max())
    if low == high:
        return [(low, slice(None))]
    if (labels[1:] < labels[:-1]).any():
        small = labels - low
        # numpy sorts 16 bits by radix, ten times as fast.
        order = np.argsort(small.astype(np.uint16) if high - low < 2**16 else small, kind="stable")
        return [(label, order[rows]) for label, rows in groups(labels[order])]
    starts = np.flatnonzero(np.diff(labels, prepend=low - 1)).tolist()
    runs = zip(starts, [*starts[1:], labels.size], strict=True)
    return [(int(labels[start]), slice(start, stop)) for start, stop in runs]


def _cipher(count: int, keys: list[_UInt64s], values: _UInt64s, inverse: bool) -> _UInt64s:
    """Apply the Feistel network on [0, 2^bits), the smallest such set that holds [0, count)."""
    bits = (count - 1).bit_length()
    result = np.empty_like(values)
    x, y = np.empty((2, min(BLOCK, values.size)), np.uint64)
    for start in range(0, values.size, BLOCK):
        block = slice(start, start + BLOCK)
        result[block] = _block(values[block], keys, bits, inverse, x, y)
    return result


def _block(
    values: _UInt64s, keys: list[_UInt64s], bits: int, inverse: bool, x: _UInt64s, y: _UInt64s
) -> _UInt64s:
    """Apply the network to at most BLOCK values, with `x` and `y` for temporaries.

    The halves have `a` and `b` bits and are exchanged in each round. ROUNDS is even, so they end
    where they began. The round function is the top `a` bits of a 64-bit hash.
    """
    x, y = x[: values.size], y[: values.size]
    a, b = bits - bits // 2, bits // 2
    left, right = values >> np.uint64(b), values & np.uint64((1 << b) - 1)
    if inverse:
        left, right, a, b = right, left, b, a
    for key in reversed(keys) if inverse else keys:
        np.add(right, key, out=x)
        np.multiply(x, _MULTIPLY_1, out=x)
        np.right_shift(x, _SHIFT, out=y)
        np.bitwise_xor(x, y, out=x)
        np.multiply(x, _MULTIPLY_2, out=x)
        np.right_shift(x, _SHIFTS[a], out=x)
        np.bitwise_xor(left, x, out=left)
        left, right, a, b = right, left, b, a
    if inverse:
        left, right, a, b = right, left, b, a
    left <<= np.uint64(b)
    left |= right
    return left


def _mix(x: int) -> int:
    """Do the same as `scramble` for one integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=_TABLES)
def _table(count: int, key: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return a small permutation and its inverse. The hashes of one key are all different."""
    forward = np.argsort(hashes(key, np.arange(count)))
    return forward.astype(np.uint16), np.argsort(forward).astype(np.uint16)
