"""Defines the loaders without a peer package: bare loops, np.memmap, h5py and hpctrain's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpctrain.config.schema import DataConfig
from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.order import Order, Sampler
from hpctrain.data.sources.reader import Reader
from tests.benchmarks.loaders.competitor import Competitor, MapStyle, Stateful
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


class Memmap(MapStyle):
    """np.memmap in torch's DataLoader, with one fancy index for each batch."""

    def dataset(self, work: Work, folder: Path) -> Any:
        return _Memmap(work, folder.parent)


class _Memmap:
    def __init__(self, work: Work, folder: Path) -> None:
        self.count, self.arrays = work.count, work.arrays(folder)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, rows: list[int]) -> Batch:
        return {name: tensor(array[rows]) for name, array in self.arrays.items()}


class H5pyBatches(MapStyle):
    """h5py in torch's DataLoader with one fancy index, of ascending rows, for each batch."""

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        with h5py.File(folder / "data.h5", "w") as file:
            for name, array in work.arrays(folder.parent).items():
                file.create_dataset(name, data=array)

    def dataset(self, work: Work, folder: Path) -> Any:
        return _H5pyBatches(work, folder)


class _H5pyBatches:
    def __init__(self, work: Work, folder: Path) -> None:
        self.work, self.path = work, folder / "data.h5"
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.work.count

    def datasets(self) -> dict[str, h5py.Dataset]:
        if self.file is None:  # opened in the worker process, not before the fork
            self.file = h5py.File(self.path, "r")
            self.opened = {name: self.file[name] for name in self.work.fields}
        return self.opened

    def __getitems__(self, rows: list[int]) -> Batch:
        ascending, back = np.unique(rows, return_inverse=True)
        return {name: tensor(data[ascending][back]) for name, data in self.datasets().items()}


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
