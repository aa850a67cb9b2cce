"""Read weights of any layout into a model of any layout: each rank reads only its own part.

checkpoint of ours    the reader of DCP, which reads what a DTensor needs
safetensors           the slices that a DTensor needs, without the rest of the file
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.base.errors import StorageError
from hpctrain.engine.checkpoint.tensor_reader import TensorReader
from hpctrain.engine.distributed.tensors import dtype_name, local, own_region
from hpctrain.runs.checkpoints.matching import torch_name
from hpctrain.runs.checkpoints.weight_files import Stored, WeightFiles

_Targets = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StoredWeights:
    """Weights in files: a checkpoint, a file, or a folder of Hugging Face.

    `shapes` and `dtypes`, such as bfloat16, are those of each weight by its name. `load` copies
    weights into tensors, in place; this process does it alone. The tensor for each stored name has
    the same shape and any dtype; of a DTensor only this rank's part is read.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    load: Callable[[_Targets], None]


def open_weights(files: WeightFiles, part: str = "model") -> StoredWeights:
    """Return what reads these files; of a checkpoint the model, or "ema", its moving average."""
    if files.tensors is None:
        return _of_checkpoint(files.path, part)
    shapes = {name: stored.shape for name, stored in files.tensors.items()}
    dtypes = {name: torch_name(stored.dtype) for name, stored in files.tensors.items()}
    return StoredWeights(shapes, dtypes, partial(_load_safetensors, files.tensors))


def _of_checkpoint(checkpoint: Path, part: str) -> StoredWeights:
    """Return the weights or their average; rank 0's where ranks differed (local SGD)."""
    reader = TensorReader(checkpoint)
    if alone := reader.part(f"replica.0.{part}"):
        part = f"replica.0.{part}"
    found = alone or reader.part(part)
    entries = {n: e for n, e in found.items() if isinstance(e, TensorStorageMetadata)}

    def load(targets: _Targets) -> None:
        if targets:
            reader.load({part: dict(targets)}, no_dist=True)

    shapes = {name: tuple(entry.size) for name, entry in entries.items()}
    dtypes = {name: dtype_name(entry.properties.dtype) for name, entry in entries.items()}
    return StoredWeights(shapes, dtypes, load)


def _load_safetensors(stored: Mapping[str, Stored], targets: _Targets) -> None:
    """Read from files that are mapped: only what is asked for."""
    from safetensors import SafetensorError, safe_open

    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in targets:
        by_file[stored[name].file].append(name)
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
