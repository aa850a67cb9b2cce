"""The weights of a checkpoint for a plain model on one process, without the optimizer."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hpctrain.checkpoint.starting_point import restore, restore_average
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.checkpoint.weight_files import WeightFiles


def load_weights(
    model: nn.Module, checkpoint: Path, *, ema: bool = False, trained_only: bool = False
) -> None:
    """Load only the weights of a checkpoint, on this process alone.

    `ema` takes the moving average of the parameters (`train.ema`); those that were frozen, and
    buffers, are the model's. Where the ranks had models that differ (local SGD), rank 0's is taken.
    With `trained_only` the checkpoint lacks the weights of the base (LoRA), which are left as they
    are.

    Raises:
        StorageError: The checkpoint lacks weights of the model, or cannot be read.
    """
    files = WeightFiles(checkpoint, None)
    restore(model, open_weights(files), trained_only=trained_only)
    if ema:
        restore_average(model, open_weights(files, "ema"))
