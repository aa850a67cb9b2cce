"""Casts of numbers to another dtype, and the numbers that such a cast would change."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.shards.types import Array


def cast(array: Array, dtype: str) -> tuple[Array, NDArray[np.bool_] | None]:
    """Cast an array; also return a mask of the numbers that change (None if there are none)."""
    target = np.dtype(dtype)
    with np.errstate(all="ignore"):
        result = array.astype(target, copy=False)
    changed = lost(array, target)
    return result, changed if changed.any() else None


def lost(values: Array, to: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return a mask of the numbers that `to` cannot hold.

    Rounding a float to fewer digits is no loss. A number beyond the range of `to`, a fraction cast
    to an integer, and an integer that a float has to round are losses.
    """
    exact = to.kind != "f" or values.dtype.kind == "f" or values.dtype.itemsize < 8
    if exact and np.can_cast(values.dtype, to, "safe"):
        return np.zeros(values.shape, bool)
    bad: NDArray[np.bool_]
    with np.errstate(all="ignore"):
        if to.kind == "f" and values.dtype.kind == "f":
            bad = np.isfinite(values) & ~np.isfinite(values.astype(to))
            return bad
        if to.kind == "f":
            there = values.astype(to).astype(np.float64)
            limit = 2.0**64 if values.dtype == np.uint64 else 2.0**63
            fits = np.isfinite(there) & (there < limit)
            bad = ~fits | (np.where(fits, there, 0).astype(values.dtype) != values)
            return bad
        info = np.iinfo(to)
        if values.dtype.kind == "f":
            wide = values.astype(np.float64)
            # float(max) is 2**63 for int64, which is too large; the others are exact.
            fits = (wide >= float(info.min)) & (wide < float(info.max) + (info.bits < 64))
            bad = ~fits | (np.floor(wide) != wide)
            return bad
    lowest = np.iinfo(values.dtype)
    bad = np.zeros(values.shape, bool)
    if info.min > lowest.min:
        bad |= values < info.min
    if info.max < lowest.max:
        bad |= values > info.max
    return bad
