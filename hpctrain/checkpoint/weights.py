"""The weights of a checkpoint for a plain model on one process, without the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hpctrain.checkpoint.tensor_reader import Reader
from hpctrain.errors import StorageError


def load_weights(model: nn.Module, checkpoint: Path, *, trained_only: bool = False) -> None:
    """Load only the weights of a checkpoint, on this process alone.

    Args:
        model: The plain model.
        checkpoint: The folder of the checkpoint. Where the ranks had models that differ (local
            SGD), rank 0's is taken.
        trained_only: Whether the checkpoint lacks the frozen parameters (LoRA), which are left as
            they are.

    Raises:
        StorageError: The checkpoint lacks weights of the model, or cannot be read.
    """
    reader = Reader(checkpoint)
    saved = reader.saved
    weights = {n: value for n, value in model.state_dict().items() if torch.is_tensor(value)}
    if trained_only:
        named = model.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        weights = {name: value for name, value in weights.items() if name not in frozen}
    alone = any(name.startswith("replica.0.model.") for name in saved)
    part = "replica.0.model" if alone else "model"
    found = {name: value for name, value in weights.items() if f"{part}.{name}" in saved}
    # A parameter with two names, as in tied embeddings, may be saved under one of them.
    loaded = {value.data_ptr() for value in found.values()}
    if lacking := [name for name in weights if weights[name].data_ptr() not in loaded]:
        raise StorageError(
            f"{checkpoint} has no {lacking[0]}: it is the checkpoint of another model"
        )
    reader.load({part: found}, no_dist=True)
