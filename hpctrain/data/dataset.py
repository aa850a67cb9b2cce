"""The data sets of hpctrain for other training loops: torch, Lightning, Accelerate.

`HDF5Dataset` is a map-style torch dataset, for any sampler and any DataLoader. torch asks it for
whole batches, which it reads in one gather; its `collate` does not take them apart:

    dataset = HDF5Dataset(folder, "train")
    loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=dataset.collate)

Accelerate divides the batches among its processes:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`LoaderDataset` wraps our own `Loader`, which is faster, shuffles without memory and resumes
exactly. Each rank gets its share already, so it must not be divided again:

    loader = Loader(Reader(folder, "train"), global_batch_size=64, dp_rank=rank, dp_size=ranks)
    for batch in DataLoader(LoaderDataset(loader), batch_size=None): ...          # one epoch

Lightning takes it directly, with `use_distributed_sampler=False`, and stores its state in the
checkpoints: a run that is resumed in the middle of an epoch sees the rest of that epoch:

    trainer = lightning.Trainer(use_distributed_sampler=False)
    trainer.fit(module, LoaderDataset(loader), ckpt_path="last")
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from hpctrain.base.errors import ConfigError
from hpctrain.data.loading.collate import MASK, WIDER, Buffers, Collate
from hpctrain.data.loading.loader import Loader
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Batch
from hpctrain.data.sources.reader import Reader

Sample = dict[str, torch.Tensor]


class Samples(Sequence[Sample]):
    """Samples that were read together; one is taken out only when it is indexed."""

    def __init__(self, rows: Mapping[str, Array | Ragged]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def __getitem__(self, i: Any) -> Any:
        """Return sample `i`, 0 to len - 1: a tensor for each field, not padded."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return {name: _tensor(value[i]) for name, value in self._rows.items()}

    def batch(self) -> Batch:
        """Return a batch of all samples, as a `Loader` does with collate="pad", without mask."""
        collate = Collate({}, "pad", Buffers())
        (batch,) = collate(self._rows, np.ones((1, len(self)), np.bool_))
        del batch[MASK]  # all samples count
        return batch


class HDF5Dataset(Dataset[Any]):
    """One split as a map-style data set; it works after a fork, and can be pickled.

    A sample has a tensor for each field, (*shape), or (length, *shape) if the length varies. The
    dtype is that of the field, but uint16 becomes int32 and uint32 becomes int64.

    Args:
        folder: Folder of the data set (with its index.json).
        split: Name of the split.
        fields: The fields to read; all by default.
        transform: A function that is applied to each sample.

    Raises:
        DataError: There is no data set, or no such split or field.
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
        """Return sample `index`, 0 to len - 1, transformed."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return many samples with one read; torch's DataLoader calls it for each batch."""
        samples = Samples(self.reader.read(np.asarray(indices, np.int64)))
        return samples if self.transform is None else [self.transform(s) for s in samples]

    @staticmethod
    def collate(samples: Sequence[Any]) -> Any:
        """Make a batch: at once if the samples were read together, otherwise as torch does."""
        return samples.batch() if isinstance(samples, Samples) else default_collate(list(samples))


class LoaderDataset(IterableDataset[Batch]):
    """A `Loader` that is iterated over one epoch at a time; nothing else may use the loader.

    Each `iter()` gives one epoch. After `load_state_dict` it is the rest of the epoch of the state;
    otherwise a new epoch, also if the consumer left the one before early. The length is that of a
    whole epoch. For an evaluation too, the loader has no `max_epochs`; it has shuffle=False and
    tail="pad".
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches: Iterator[Batch] | None = None  # one iterator for all epochs
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
        if offset and not self._resumed:  # the consumer left the epoch early
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
        self._batches = None  # the loader has ended

    def state_dict(self) -> dict[str, int]:
        """See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`, also in the middle of an epoch; see `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._batches, self._resumed = None, True


def _tensor(values: Any) -> torch.Tensor:
    array = np.asarray(values)
    return torch.from_numpy(array.astype(WIDER.get(array.dtype, array.dtype), copy=False))
