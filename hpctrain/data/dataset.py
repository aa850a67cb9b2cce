"""A data set of hpctrain for other training loops: torch, Lightning, Accelerate.

`HDF5Dataset` is a map-style torch dataset, for any sampler and any DataLoader. torch asks it for
whole batches, which it reads in one gather; its `collate` does not take them apart:

    dataset = HDF5Dataset(folder, "train")
    loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=dataset.collate)

Accelerate divides the batches among its processes:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from hpctrain.data.buffers import Buffers
from hpctrain.data.loading.collate import MASK, WIDER, Collate
from hpctrain.data.sources.reader import Reader
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array, Batch

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


def _tensor(values: Any) -> torch.Tensor:
    array = np.asarray(values)
    return torch.from_numpy(array.astype(WIDER.get(array.dtype, array.dtype), copy=False))
