"""The data sets of hpctrain in other people's training loops.

`HDF5Dataset` is a plain map-style torch dataset: any sampler, any DataLoader. torch asks it for
whole batches, which it gathers at once; with its `collate` they stay whole:

    dataset = HDF5Dataset(folder, "train")
    loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=dataset.collate)

Accelerate divides that among its processes:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`LoaderDataset` wraps our own `Loader`, which is faster, shuffles without memory and resumes
exactly. It already gives each rank its share, so nobody may divide it again:

    loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=rank, dp_size=ranks)
    for batch in DataLoader(LoaderDataset(loader), batch_size=None): ...          # one epoch

Lightning takes it as it is, with `use_distributed_sampler=False`, and stores its state in the
checkpoints, so that a run that continues in the middle of an epoch sees the rest of that epoch:

    trainer = lightning.Trainer(use_distributed_sampler=False)
    trainer.fit(module, LoaderDataset(loader), ckpt_path="last")
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from hpctrain.data.buffers import Buffers
from hpctrain.data.collate import MASK, WIDER, Collate
from hpctrain.data.loader import Loader
from hpctrain.data.ragged import Ragged
from hpctrain.data.reader import Reader
from hpctrain.data.types import Array, Batch
from hpctrain.errors import ConfigError

Sample = dict[str, torch.Tensor]


class Samples(Sequence[Sample]):
    """Samples that were read together; they become single ones only where one is asked for."""

    def __init__(self, rows: Mapping[str, Array | Ragged]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def __getitem__(self, i: Any) -> Any:
        """Sample `i`, 0 to len - 1: a tensor for each field, as long as it is."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return {name: _tensor(value[i]) for name, value in self._rows.items()}

    def batch(self) -> Batch:
        """Return all of them, as a `Loader` does: lengths that vary are padded, with a length."""
        collate = Collate({}, "pad", Buffers())
        (batch,) = collate(self._rows, np.ones((1, len(self)), np.bool_))
        del batch[MASK]  # all of them count
        return batch


class HDF5Dataset(Dataset[Any]):
    """One split as a map-style data set; processes may fork from it, and it can be pickled.

    A sample has a tensor (*shape) for each field, (length, *shape) where the length varies:
    the dtype of the field, but uint16 becomes int32 and uint32 int64.

    Args:
        folder: Of the data set (with its index.json).
        split: Name of the split.
        fields: The fields to read; all by default.
        transform: From a sample to what shall stand for it.

    Raises:
        DataError: See `hpctrain.data.reader.Reader`.
    """

    def __init__(
        self,
        folder: Path | str,
        split: str,
        fields: Iterable[str] | None = None,
        transform: Callable[[Sample], Any] | None = None,
    ) -> None:
        self.reader = Reader(Path(folder), split, fields)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, 0 to len - 1, transformed."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Many samples by one read; torch's DataLoader asks for its batches this way."""
        samples = Samples(self.reader.read(np.asarray(indices, np.int64)))
        return samples if self.transform is None else [self.transform(s) for s in samples]

    @staticmethod
    def collate(samples: Sequence[Any]) -> Any:
        """Make a batch: at once where the samples were read together, else as torch does."""
        return samples.batch() if isinstance(samples, Samples) else default_collate(list(samples))


class LoaderDataset(IterableDataset[Batch]):
    """A `Loader`, for those who iterate by epochs.

    Each `iter()` is one epoch: the rest of it after `load_state_dict`, else a new one, also when
    the one before was broken off. Its length is that of a whole epoch. For evaluation, too, give
    it a loader without `max_epochs`, with shuffle=False and tail="pad".

    Args:
        loader: This rank's; from now on it is used only here.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches: Iterator[Batch] | None = None  # lives on from epoch to epoch
        self._resumed = False

    def __len__(self) -> int:
        return self._loader.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "LoaderDataset needs DataLoader(num_workers=0): its loader reads ahead in threads "
                "of its own, and every worker process would give the same batches"
            )
        loader = self._loader
        offset = loader.state_dict()["consumed"] % loader.count
        if offset and not self._resumed:  # broken off: go to the next epoch
            loader.load_state_dict({"consumed": (loader.epoch + 1) * loader.count})
            self._batches = None
        self._resumed = False
        epoch = loader.epoch
        if self._batches is None:
            self._batches = iter(loader)
        for batch in self._batches:
            yield batch
            if loader.epoch != epoch:
                return
        self._batches = None  # the loader has an end

    def state_dict(self) -> dict[str, int]:
        """Where the consumer is; see `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue there, in the middle of an epoch too; see `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._batches, self._resumed = None, True


def _tensor(values: Any) -> torch.Tensor:
    array = np.asarray(values)
    return torch.from_numpy(array.astype(WIDER.get(array.dtype, array.dtype), copy=False))
