"""Defines the loaders without a peer package: a bare loop, np.memmap and hpctrain's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.config.schema import DataConfig
from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.order import Order, Sampler
from hpctrain.data.sources.reader import Reader
from tests.benchmarks.loaders.competitor import Competitor, Shuffle, Stateful
from tests.benchmarks.loaders.works import Batch, Work, tensor
from tests.written import write_shards


class NumpyGather(Competitor):
    """A bare loop that gathers rows of an np.memmap by a fancy index; the order is in memory."""

    parallel = False

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        self.arrays = work.arrays(folder.parent)
        order = torch.randperm(work.count, generator=torch.Generator().manual_seed(0))
        self.batches_of_order = list(order[: work.steps * work.batch].split(work.batch))
        self.left = self.batches_of_order[state or 0 :]

    def epoch(self) -> Iterator[Batch]:
        rows, self.left = self.left, self.batches_of_order
        return map(self.gather, rows)

    def gather(self, rows: torch.Tensor) -> Batch:
        return {name: tensor(array[rows.numpy()]) for name, array in self.arrays.items()}


class Memmap(Competitor):
    """np.memmap in torch's DataLoader, with one fancy index for each batch."""

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        self.loader = DataLoader(
            _Memmap(work, folder.parent),
            batch_size=work.batch,
            sampler=Shuffle(work.count, (state or 0) * work.batch),
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_whole,  # a bound method would keep the workers alive
        )


def _whole(batch: Batch) -> Batch:
    return batch


class _Memmap:
    def __init__(self, work: Work, folder: Path) -> None:
        self.count, self.arrays = work.count, work.arrays(folder)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, rows: list[int]) -> Batch:
        return {name: tensor(array[rows]) for name, array in self.arrays.items()}


class Hpctrain(Stateful):
    """hpctrain's loader, with one thread that reads ahead; two instead of two worker processes."""

    threads = 1

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        arrays = work.arrays(folder.parent)
        write_shards(
            folder,
            (
                ("train", {name: array[start : start + 100] for name, array in arrays.items()})
                for start in range(0, work.count, 100)
            ),
        )

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        reader = Reader(folder, "train")
        self.loader = Loader(
            reader,
            global_batch_size=work.batch,
            sampler=self.sampler(reader),
            threads=max(self.threads, workers),
        )
        if state is not None:
            self.loader.load_state_dict(state)

    def sampler(self, reader: Reader) -> Sampler:
        return Order(len(reader), seed=0)


class HpctrainBlock(Hpctrain):
    """hpctrain's loader with block shuffle, the mode for data that is not in the page cache."""

    shuffle = "block"

    def sampler(self, reader: Reader) -> Sampler:
        return BlockOrder(len(reader), 0, reader.block_size(), DataConfig().window)
