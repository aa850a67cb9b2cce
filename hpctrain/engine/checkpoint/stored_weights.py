"""Read weights of any layout into a model of any layout: each rank reads only its own part.

checkpoint of ours    the reader of DCP, which reads what a DTensor needs
safetensors           the slices that a DTensor needs, without the rest of the file
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.base.errors import StorageError
from hpctrain.engine.checkpoint.tensor_reader import TensorReader
from hpctrain.engine.distributed.tensors import dtype_name, local, own_region
from hpctrain.runs.checkpoints.matching import torch_name
from hpctrain.runs.checkpoints.weight_files import Stored, WeightFiles


class StoredWeights(ABC):
    """Weights in files: a checkpoint, a file, or a folder of Hugging Face.

    `shapes` and `dtypes`, such as bfloat16, are those of each weight by its name.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @abstractmethod
    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy weights into tensors, in place; this process does it alone.

        The tensor for each stored name has the same shape and any dtype; of a DTensor only this
        rank's part is read.
        """


def open_weights(files: WeightFiles, part: str = "model") -> StoredWeights:
    """Return what reads these files; of a checkpoint the model, or "ema", its moving average."""
    if files.tensors is None:
        return _OfCheckpoint(files.path, part)
    return _OfSafetensors(files.path, files.tensors)


class _OfCheckpoint(StoredWeights):
    """The weights or their average in a checkpoint; rank 0's where ranks differed (local SGD)."""

    def __init__(self, checkpoint: Path, part: str) -> None:
        self.path, self._reader = checkpoint, TensorReader(checkpoint)
        alone = self._reader.part(f"replica.0.{part}")
        self._part = f"replica.0.{part}" if alone else part
        found = alone or self._reader.part(part)
        entries = {n: e for n, e in found.items() if isinstance(e, TensorStorageMetadata)}
        self.shapes = {name: tuple(entry.size) for name, entry in entries.items()}
        self.dtypes = {name: dtype_name(entry.properties.dtype) for name, entry in entries.items()}

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        if targets:
            self._reader.load({self._part: dict(targets)}, no_dist=True)


class _OfSafetensors(StoredWeights):
    """The tensors of safetensors files; a file is mapped, and only what is asked for is read."""

    def __init__(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        self.path, self._tensors = path, tensors
        self.shapes = {name: stored.shape for name, stored in tensors.items()}
        self.dtypes = {name: torch_name(stored.dtype) for name, stored in tensors.items()}

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in targets:
            by_file[self._tensors[name].file].append(name)
        for path, names in by_file.items():
            try:
                with safe_open(path, "pt") as file, torch.no_grad():
                    for name in names:
                        target = targets[name]
                        own = local(target)
                        if not target.ndim:
                            own.copy_(file.get_tensor(name))
                        elif own.numel():
                            own.copy_(file.get_slice(name)[own_region(target)])
            except (SafetensorError, OSError) as error:
                raise StorageError(f"{path}: cannot be read ({error})") from error
