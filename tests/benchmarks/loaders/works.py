"""The three data sets that every loader gives: images, windows of tokens, fields of numbers.

The last field of a sample begins with the sample's number, so that a batch says which samples it
has.
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
    """A data set and how it is to be batched."""

    name: str
    count: int
    batch: int
    fields: dict[str, Field]

    @property
    def sample_bytes(self) -> int:
        return sum(field.bytes for field in self.fields.values())

    @property
    def steps(self) -> int:
        """Batches of an epoch; the tail is dropped."""
        return self.count // self.batch

    def write(self, root: Path) -> None:
        """Random numbers into ROOT/FIELD.npy."""
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
        """What `write` wrote, mapped: (count, *shape).

        Copy on write, though nobody does: torch warns of arrays that cannot be written.
        """
        return {name: np.asarray(np.load(root / f"{name}.npy", "c")) for name in self.fields}

    def samples(self, root: Path) -> Iterator[dict[str, Array]]:
        """The samples one by one, as the writers of most formats take them."""
        arrays = self.arrays(root)
        for row in range(self.count):
            yield {name: np.asarray(array[row]) for name, array in arrays.items()}

    def numbers(self, batch: Batch) -> list[int]:
        """Which samples a batch has."""
        last = batch[list(self.fields)[-1]]
        return [int(number) for number in last.reshape(len(last), -1)[:, 0]]


def tensor(array: Array) -> torch.Tensor:
    """As the trainer takes it: torch hardly computes with uint16."""
    return torch.from_numpy(array.astype(np.int32) if array.dtype == np.uint16 else array)


_SHARE = 1 if FULL else 2  # quick: half of everything, which still exceeds a CPU's caches
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

# Read once, from the disk: large, so that what comes before the first batch hardly counts. Of a
# window of blocks that are shuffled all has to be there first.
COLD = {
    name: replace(work, count=10**9 // _SHARE // work.sample_bytes) for name, work in WORKS.items()
}
