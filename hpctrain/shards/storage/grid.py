"""Compute which chunks of a dataset hold which samples, along any sample axis."""

import math

import numpy as np

Sizes = tuple[int, ...]
_Slices = tuple[slice, ...]


def samples_first(sizes: Sizes, axis: int) -> Sizes:
    """Return a shape with `axis` moved to the front."""
    return (sizes[axis], *sizes[:axis], *sizes[axis + 1 :])


class Grid:
    """The chunks of a dataset: ranges of samples ("runs"), each in one or more chunks ("tiles").

    Attributes:
        rows: Samples in a run.
        tiles: The chunks that together hold a sample. Each has its number, the slices of the sample
            that it holds, and the slices of the chunk that are used. Both leave out the sample
            axis.
    """

    def __init__(self, shape: Sizes, chunk: Sizes, axis: int) -> None:
        counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
        self.rows = chunk[axis]
        self._along, self._apart = counts[axis], math.prod(counts[axis + 1 :])
        self.tiles = _tiles(samples_first(shape, axis)[1:], samples_first(chunk, axis)[1:])

    def chunk(self, run: int, tile: int) -> int:
        """Return the number, in C order, of the chunk that holds one tile of a run."""
        outer, inner = divmod(tile, self._apart)
        return (outer * self._along + run) * self._apart + inner


def _tiles(shape: Sizes, chunk: Sizes) -> list[tuple[int, _Slices, _Slices]]:
    if shape == chunk:
        return [(0, (), ())]
    tiles = []
    grid = [-(-n // size) for n, size in zip(shape, chunk, strict=True)]
    for number, place in enumerate(np.ndindex(*grid)):
        starts = [i * size for i, size in zip(place, chunk, strict=True)]
        lengths = [min(size, n - at) for n, size, at in zip(shape, chunk, starts, strict=True)]
        inside = tuple(slice(at, at + size) for at, size in zip(starts, lengths, strict=True))
        tiles.append((number, inside, tuple(slice(size) for size in lengths)))
    return tiles
