"""The speed of reading a data set, through the reader of the trainings."""

from __future__ import annotations

import time

import numpy as np

from hpctrain.data.sources.reader import Reader
from hpctrain.shards.ragged import Ragged

_SECONDS, _PARTS, _ROWS = 1.0, 5, 64


def measured(path: str, split: str, rank: int, ranks: int) -> float:
    """Return 1e6 bytes per second of samples, read in blocks at random places of a data set.

    What the system has in its cache comes from there, as in a training's second epoch. The fastest
    of some parts of the time counts: during the others, other work may have had the CPU.

    Raises:
        DataError: It is no data set, or it is damaged.
    """
    reader = Reader(path, split, None)
    random, rows = np.random.default_rng(rank), min(_ROWS, len(reader))
    return max(_speed(reader, random, rows) for _ in range(_PARTS))


def _speed(reader: Reader, random: np.random.Generator, rows: int) -> float:
    count, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + _SECONDS / _PARTS:
        first = int(random.integers(0, len(reader) - rows + 1))
        samples = reader.read(np.arange(first, first + rows))
        values = (each.values if isinstance(each, Ragged) else each for each in samples.values())
        count += sum(each.nbytes for each in values)
    return count / (time.perf_counter() - begin) / 1e6
