"""Divides groups of samples, such as the recordings of a patient, into parts. None is in two parts.

    groups in a random order     a a a | c | b b b b | e e | d d
    cut at the fractions         └───── 0.6 ─────────┘└─ 0.4 ──┘

A group goes where its middle lies. Of some random orders the one whose parts are nearest to the
fractions is taken. It is a pure function of the keys of the samples, the fractions and the seed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import DataError
from hpctrain.data.samplers.permutation import hashes, make_key
from hpctrain.data.shards.types import Int64s

_TRIES = 64
_WORK = 10**7  # groups, or samples with strata, that are looked at in all tries together


def divide(
    keys: NDArray[np.uint64],
    fractions: Sequence[float],
    seed: int = 0,
    strata: Int64s | None = None,
) -> NDArray[np.intp]:
    """Return the number of the part of each sample, (n,); each part has at least one group.

    `keys`, (n,), say which group a sample belongs to, and the fractions add up to 1. With `strata`,
    the class of each sample, each part has its fraction of each class, about.
    """
    found, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if len(found) < len(fractions):
        raise DataError(
            f"{len(found)} groups are too few for {len(fractions)} parts: no group is divided"
        )
    ends = np.cumsum(fractions)[:-1] * len(keys)
    classes = np.zeros(0, np.intp) if strata is None else np.unique(strata, return_inverse=True)[1]
    work = len(found) if strata is None else len(keys)
    best, lowest = np.zeros(0, np.intp), np.inf
    for number in range(max(1, min(_TRIES, _WORK // work))):
        order = np.argsort(hashes(make_key(seed, number), found.view(np.int64)), kind="stable")
        part = np.empty(len(found), np.intp)
        middles = np.cumsum(counts[order]) - counts[order] / 2
        part[order] = np.searchsorted(ends, middles, side="right")
        _fill(part, counts, order, len(fractions))
        distance = _distance(part, group, counts, fractions, classes)
        if distance < lowest:
            best, lowest = part, distance
    return best[group]


def first_seen(keys: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Number the groups in the order in which they first come; return the number of each sample."""
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.intp)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[group]


def _fill(part: NDArray[np.intp], counts: Int64s, order: Int64s, parts: int) -> None:
    """Give each part without a group the smallest group of the part that has most groups."""
    for empty in set(range(parts)) - set(part.tolist()):
        giver = int(np.bincount(part, minlength=parts).argmax())
        own = order[part[order] == giver]
        part[own[counts[own].argmin()]] = empty


def _distance(
    part: NDArray[np.intp],
    group: NDArray[np.intp],
    counts: Int64s,
    fractions: Sequence[float],
    classes: NDArray[np.intp],
) -> float:
    """Return how far the parts are from the fractions: the squares of what is too much."""
    wanted = np.asarray(fractions)
    if not len(classes):
        got = np.bincount(part, counts, len(wanted))[None]
    else:
        rows = int(classes.max()) + 1
        got = np.bincount(classes * len(wanted) + part[group], minlength=rows * len(wanted))
        got = got.reshape(rows, -1)
    return float(((got - got.sum(1, keepdims=True) * wanted) ** 2).sum())
