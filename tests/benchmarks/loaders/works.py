"""Defines the three data sets that every loader reads: images, windows of tokens, 3-D fields.

The last field of a sample begins with the sample's number, so a batch shows which samples it has.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, torch.Tensor]

FULL = os.environ.get("HPCTRAIN_LOADERS", "quick") == "full"


class Field(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape))


@dataclass(frozen=True)
class Work:
    """A data set and its batch size."""

    name: str
    count: int
    batch: int
    fields: dict[str, Field]

    @property
    def sample_bytes(self) -> int:
        return sum(field.bytes for field in self.fields.values())

    @property
    def steps(self) -> int:
        """The number of batches in an epoch; an incomplete last batch is dropped."""
        return self.count // self.batch

    def write(self, root: Path) -> None:
        """Write random numbers to ROOT/FIELD.npy; each sample begins with its own number."""
        root.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for name, field in self.fields.items():
            shape = (self.count, *field.shape)
            array = np.lib.format.open_memmap(root / f"{name}.npy", "w+", field.dtype, shape)
            for start in range(0, self.count, 1000):
                rows = array[start : start + 1000]
                rows[:] = rng.integers(0, 256, rows.shape, np.uint8)
            array.reshape(self.count, -1)[:, 0] = np.arange(self.count) % 2**16

    def arrays(self, root: Path) -> dict[str, Array]:
        """Return memory maps of the arrays that `write` wrote, (count, *shape).

        They are copy-on-write, because torch warns about arrays that cannot be written.
        """
        return {name: np.asarray(np.load(root / f"{name}.npy", "c")) for name in self.fields}

    def samples(self, root: Path) -> Iterator[dict[str, Array]]:
        """Yield the samples one by one, as the writers of most formats take them."""
        arrays = self.arrays(root)
        for row in range(self.count):
            yield {name: np.asarray(array[row]) for name, array in arrays.items()}

    def numbers(self, batch: Batch) -> list[int]:
        """Return the numbers of the samples in a batch."""
        last = batch[list(self.fields)[-1]]
        return [int(number) for number in last.reshape(len(last), -1)[:, 0]]


def tensor(array: Array) -> torch.Tensor:
    """Return a tensor, with int32 for uint16: torch has few operations for uint16."""
    return torch.from_numpy(array.astype(np.int32) if array.dtype == np.uint16 else array)


_SHARE = 1 if FULL else 2  # a quick run has half of the samples, still more than CPU caches hold
WORKS = {
    work.name: work
    for work in (
        Work(
            "images",
            20_000 // _SHARE,
            64,
            {"image": Field("uint8", (3, 64, 64)), "label": Field("int64", ())},
        ),
        Work("tokens", 48_780 // _SHARE, 16, {"tokens": Field("uint16", (1025,))}),
        Work("fields", 400 // _SHARE, 4, {"field": Field("float32", (8, 256, 256))}),
    )
}

# For cold reads. Block shuffle reads a whole window of blocks before the first batch; these data
# sets are so large (1 GB, or half of it) that this hardly counts.
COLD = {
    name: replace(work, count=10**9 // _SHARE // work.sample_bytes) for name, work in WORKS.items()
}
