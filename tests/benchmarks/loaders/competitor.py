"""The interface of a measured loader, and the common part of those with torch's DataLoader."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Sampler

from tests.benchmarks.loaders.works import Batch, Work


class Competitor:
    """One way to load; made anew for each measurement, so its start is measured too.

    Attributes:
        package: Its name on PyPI, installed into an environment of its own; "": none is needed.
        peer: Whether it is one of the loaders that ours is compared with.
        by_hand: Whether it makes tensors by code of ours, not in the peer's own way.
        shuffle: How it shuffles.
        resumes: Whether it can resume; that is then checked.
        parallel: Whether two processes (for ours: two threads) make sense.
    """

    package: ClassVar[str] = ""
    peer: ClassVar[bool] = False
    by_hand: ClassVar[bool] = False
    shuffle: ClassVar[str] = "full"
    resumes: ClassVar[bool] = True
    parallel: ClassVar[bool] = True

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        """Write the data set, whose raw arrays lie in the parent folder, in its own format."""

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        """Open what `write` wrote; `workers` processes; from `state` on."""
        raise NotImplementedError

    def epoch(self) -> Iterable[Batch]:
        """One epoch, or what is left of the resumed one."""
        raise NotImplementedError

    def batches(self) -> Iterator[Batch]:
        """Epoch after epoch, without end."""
        while True:
            yield from self.epoch()

    def close(self) -> None:
        """Close what the garbage collector does not close."""

    def state(self, consumed: int) -> Any:
        """Return the state after `consumed` batches of the first epoch."""
        return consumed


class Shuffle(Sampler[int]):
    """torch's RandomSampler with what it needs to resume: a seed per epoch, and where to begin."""

    def __init__(self, count: int, start: int) -> None:
        self.count, self.start, self.epoch = count, start, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        start, self.start, self.epoch = self.start, 0, self.epoch + 1
        return iter(order[start:])


class MapStyle(Competitor):
    """A map-style dataset in torch's DataLoader; with __getitems__, it returns whole batches."""

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        self.loader = DataLoader(
            self.dataset(work, folder),
            batch_size=work.batch,
            sampler=Shuffle(work.count, (state or 0) * work.batch),
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=self.collate(),
        )

    def dataset(self, work: Work, folder: Path) -> Any:
        raise NotImplementedError

    def collate(self) -> Callable[[Any], Batch]:
        """What makes a batch; not a method, in whose cycle the workers would live on."""
        return _whole

    def epoch(self) -> Iterable[Batch]:
        return self.loader


def _whole(batch: Batch) -> Batch:
    return batch
