"""Cross-validation: the samples of a split in N folds; each run trains without one of them.

    data.fold=1/5    samples 0 1 2 3 4 5 6 7 8 9     fold 1: 3 8      training: all others

The folds are a pure function of the samples, of N and of the seed, and each sample is in exactly
one of them. With groups, no group is in two folds.
"""

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.samplers.groups import divide
from hpctrain.data.samplers.order import Order
from hpctrain.data.samplers.permutation import make_key
from hpctrain.errors import DataError

_FOLDS = 0x666F6C6473  # "folds": another permutation than that of the order with the same seed


def held_out(
    fold: tuple[int, int], count: int, seed: int, groups: NDArray[np.uint64] | None = None
) -> NDArray[np.bool_]:
    """Return which samples are in a fold, (count,).

    Args:
        fold: Number K, from 0, of N folds.
        count: Samples of the split.
        seed: Any integer.
        groups: The key of each sample's group, (count,).

    Raises:
        DataError: There are fewer samples, or groups, than folds.
    """
    number, folds = fold
    key = make_key(seed, _FOLDS)
    if groups is not None:
        return np.equal(divide(groups, [1 / folds] * folds, key), number)
    if count < folds:
        raise DataError(f"{count} samples are too few for {folds} folds")
    chosen = np.zeros(count, bool)
    positions = np.arange(count * number // folds, count * (number + 1) // folds)
    chosen[Order(count, key)(0, positions)] = True
    return chosen
