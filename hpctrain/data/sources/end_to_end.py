"""Pieces that lie end to end in one index space, such as the shards of a split."""

from collections.abc import Sequence

import numpy as np

from hpctrain.data.samplers.order import check_positions
from hpctrain.data.shards.types import Int64s


class EndToEnd:
    """Where an index lies, given the `counts` of elements of the pieces.

    Piece i has the indices from `firsts[i]` to `ends[i]`.
    """

    def __init__(self, counts: Sequence[int] | Int64s) -> None:
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.firsts: Int64s = self.ends - np.asarray(counts, np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def pieces(self, indices: Int64s) -> Int64s:
        """Return the piece of each index."""
        return np.searchsorted(self.ends, indices, side="right")

    def locate(self, indices: Int64s, of: str = "samples") -> tuple[Int64s, Int64s]:
        """Return the piece of each index, and its place there; an IndexError if there is none."""
        indices = check_positions(indices, len(self), "indices", of)
        if len(self.ends) == 1:
            return np.zeros(len(indices), np.int64), indices
        pieces = self.pieces(indices)
        return pieces, indices - self.firsts[pieces]
