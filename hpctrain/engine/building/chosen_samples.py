"""Which samples of a split a training reads, and which its evaluation: subset, fold and group.

training split ─┬─ the fold that `data.fold` names ── evaluation
                └─ the rest ── those of them in `data.subset` ── training
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import DataError
from hpctrain.config.schema import DataConfig
from hpctrain.data.samplers.groups import divide
from hpctrain.data.samplers.order import Order
from hpctrain.data.samplers.permutation import make_key
from hpctrain.data.samplers.subset import group_keys, of_groups, parse_subset
from hpctrain.data.sources.reader import Reader


class ChosenSamples:
    """Chooses samples by `data.subset`, `data.fold` and `data.group`."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._data, self._seed = data, seed
        self._keys: dict[tuple[str, str], NDArray[np.uint64]] = {}

    def of_training(self, reader: Reader, count: int) -> NDArray[Any] | range | None:
        """Return the indices of the samples, or of the windows cut from them; None: all."""
        data = self._data
        chosen: NDArray[Any] | range | None = None
        if data.subset is not None and data.group is not None and not data.subset.endswith(".npy"):
            chosen = of_groups(data.subset, self._group(reader, data.group))
        elif data.subset is not None:
            chosen = parse_subset(data.subset, count)
        if data.fold is None:
            return chosen
        is_held = self._is_held_out(reader)
        indices = np.arange(count) if chosen is None else np.asarray(chosen)
        indices = indices[~is_held[indices]]
        if not len(indices):
            raise DataError(
                f"data.subset={data.subset}: all of its samples are in data.fold={data.fold}"
            )
        return indices

    def of_fold(self, reader: Reader) -> NDArray[np.intp]:
        """Return the indices of the samples in the fold that is held out, in ascending order."""
        return np.flatnonzero(self._is_held_out(reader))

    def _is_held_out(self, reader: Reader) -> NDArray[np.bool_]:
        fold, group = self._data.fold_of, self._data.group or reader.index.group
        assert fold is not None
        keys = self._group(reader, group) if group else None
        try:
            return held_out(fold, len(reader), self._seed, keys)
        except DataError as error:
            raise DataError(f"data.fold={self._data.fold}: {error}") from error

    def _group(self, reader: Reader, name: str) -> NDArray[np.uint64]:
        """Return the key of each sample's group. The field is read once."""
        where = str(reader.folder), reader.split
        if where not in self._keys:
            self._keys[where] = group_keys(reader.only([name]), name)
        return self._keys[where]


_FOLDS = 0x666F6C6473  # "folds": another permutation than that of the order with the same seed


def held_out(
    fold: tuple[int, int], count: int, seed: int, groups: NDArray[np.uint64] | None = None
) -> NDArray[np.bool_]:
    """Return which samples are in fold number K, from 0, of N folds: bool (count,).

    `groups` has the key of each sample's group, (count,). Fewer samples, or groups, than folds are
    a DataError.
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
