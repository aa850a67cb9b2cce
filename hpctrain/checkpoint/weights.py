"""The weights of a checkpoint for a plain model on one process, without the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.checkpoint.fitting import differences
from hpctrain.checkpoint.starting_point import names_of_base
from hpctrain.checkpoint.tensor_reader import Reader
from hpctrain.errors import StorageError


def load_weights(
    model: nn.Module, checkpoint: Path, *, ema: bool = False, trained_only: bool = False
) -> None:
    """Load only the weights of a checkpoint, on this process alone.

    Args:
        model: The plain model.
        checkpoint: The folder of the checkpoint. Where the ranks had models that differ (local
            SGD), rank 0's is taken.
        ema: Take the moving average of the parameters (`train.ema`). Parameters that were frozen,
            and buffers, are those of the model.
        trained_only: Whether the checkpoint lacks the weights of the base (LoRA), which are left as
            they are.

    Raises:
        StorageError: The checkpoint lacks weights of the model, or cannot be read.
    """
    reader = Reader(checkpoint)
    saved = reader.saved
    weights = {n: value for n, value in model.state_dict().items() if torch.is_tensor(value)}
    if trained_only:
        left_out = names_of_base(model)
        weights = {name: value for name, value in weights.items() if name not in left_out}
    alone = any(name.startswith("replica.0.model.") for name in saved)
    part = "replica.0.model" if alone else "model"
    found = {name: value for name, value in weights.items() if f"{part}.{name}" in saved}
    # A parameter with two names, as in tied embeddings, may be saved under one of them.
    loaded = {value.data_ptr() for value in found.values()}
    if lacking := [name for name in weights if weights[name].data_ptr() not in loaded]:
        raise StorageError(
            f"{checkpoint} has no {lacking[0]}: it is the checkpoint of another model"
        )
    if wrong := next(differences(saved, found, part), ""):
        raise StorageError(f"{checkpoint} is the checkpoint of another model: {wrong}")
    reader.load({part: found}, no_dist=True)
    if ema:
        _load_average(model, reader, "replica.0.ema" if alone else "ema", checkpoint)


@torch.no_grad()
def _load_average(model: nn.Module, reader: Reader, part: str, checkpoint: Path) -> None:
    named = dict(model.named_parameters())
    saved = {name: reader.saved.get(f"{part}.{name}") for name in named}
    # An average of parameters in half precision has a wider format than they have.
    average = {
        name: torch.empty_like(named[name], dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if not average:
        raise StorageError(
            f"{checkpoint} has no average of the parameters: only runs with train.ema keep one"
        )
    reader.load({part: average}, no_dist=True)
    for name, values in average.items():
        named[name].copy_(values)
