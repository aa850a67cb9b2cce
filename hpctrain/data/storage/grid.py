"""Which chunks of a dataset hold which samples, along whichever axis the samples are counted."""

import math

import numpy as np

Sizes = tuple[int, ...]
Slices = tuple[slice, ...]


def samples_first(sizes: Sizes, axis: int) -> Sizes:
    """Return a shape with `axis` moved to the front."""
    return (sizes[axis], *sizes[:axis], *sizes[axis + 1 :])


class Grid:
    """The chunks of a dataset: runs of samples, each in one or more tiles.

    Args:
        shape: Of the dataset.
        chunk: Of a chunk.
        axis: Which one is the sample.

    Attributes:
        rows: Samples in a run.
        tiles: The chunks that hold a sample: number, its part of the sample, and the part of the
            chunk that is used, all without the axis of the samples.
    """

    def __init__(self, shape: Sizes, chunk: Sizes, axis: int) -> None:
        counts = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
        self.rows = chunk[axis]
        self._along, self._apart = counts[axis], math.prod(counts[axis + 1 :])
        self.tiles = _tiles(samples_first(shape, axis)[1:], samples_first(chunk, axis)[1:])

    def chunk(self, run: int, tile: int) -> int:
        """Return the number, in the order of C, of the chunk that holds a tile of a run."""
        outer, inner = divmod(tile, self._apart)
        return (outer * self._along + run) * self._apart + inner


def _tiles(shape: Sizes, chunk: Sizes) -> list[tuple[int, Slices, Slices]]:
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
