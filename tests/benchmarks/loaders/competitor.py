"""Defines the interface of a measured loader, and a sampler for torch's DataLoader."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Sampler

from tests.benchmarks.loaders.works import Batch, Work


class Competitor:
    """One way to load a data set.

    Each measurement makes a new object, so the time to open the data set is measured too.

    Attributes:
        package: Name of its package on PyPI, which gets its own environment; "": none is needed.
        shuffle: How it shuffles, as the table says it.
        parallel: Whether it is also measured with two processes (hpctrain: two threads).
    """

    package: ClassVar[str] = ""
    shuffle: ClassVar[str] = "full"
    parallel: ClassVar[bool] = True

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        """Write the data set into `folder` in its format; the parent folder has the raw arrays."""

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        """Open the data set in `folder` with `workers` processes, and continue from `state`."""
        raise NotImplementedError

    loader: Any

    def epoch(self) -> Iterable[Batch]:
        """Return the batches of one epoch, or the remaining batches of a resumed epoch."""
        found: Iterable[Batch] = self.loader
        return found

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of epoch after epoch, without end."""
        while True:
            yield from self.epoch()

    def close(self) -> None:
        """Close what the garbage collector does not close."""

    def state(self, consumed: int) -> Any:
        """Return the state after `consumed` batches of the first epoch."""
        return consumed


class Stateful(Competitor):
    """A competitor whose loader has a `state_dict`."""

    def state(self, consumed: int) -> Any:
        return self.loader.state_dict()


class Shuffle(Sampler[int]):
    """A random sampler that can resume: it has a seed per epoch, and a position to start at."""

    def __init__(self, count: int, start: int) -> None:
        self.count, self.start, self.epoch = count, start, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        start, self.start, self.epoch = self.start, 0, self.epoch + 1
        return iter(order[start:])
