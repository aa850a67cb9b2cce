"""Curves as they are drawn: thinned to what is seen."""

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


def thinned(x: ArrayLike, y: ArrayLike, most: int) -> tuple[Numbers, Numbers]:
    """Return at most about `most` points: the extremes of each part, so that no peak is lost.

    A value that is not finite becomes NaN, a gap in the line; a part with one keeps one.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= most:
        return x, y
    keep = []
    for begin, end in pairwise(np.linspace(0, len(y), most // 2 + 1).astype(int).tolist()):
        part, gaps = y[begin:end], np.flatnonzero(np.isnan(y[begin:end]))
        places = {*gaps[:1].tolist()}
        if len(gaps) < len(part):
            places |= {int(np.nanargmin(part)), int(np.nanargmax(part))}
        keep += sorted(begin + place for place in places)
    keep += [len(x) - 1] * (keep[-1] < len(x) - 1)  # the end of a curve stays
    return x[keep], y[keep]
