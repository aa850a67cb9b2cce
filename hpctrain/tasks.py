"""What a model is trained for: from a batch to sums.

A task returns *sums and counts*, never means: `{"loss": (sum, count), "accuracy": (sum, count)}`.
The trainer adds them over micro-batches and ranks and divides once, so that accumulation, DDP and
a padded tail give the number that one process would. `"loss"` is what is differentiated.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.data.types import Batch
from hpctrain.errors import ConfigError

Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Task(Protocol):
    """Any callable of this shape; the same names in the same order on every call."""

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Run the model on a batch (on the model's device) and return sums and counts."""
        ...


def field(batch: Batch, name: str, key: str) -> torch.Tensor:
    """The batch's field `name`, which the config's `key` asked for.

    Raises:
        ConfigError: the data set has no such field.
    """
    if name not in batch:
        fields = ", ".join(other for other in batch if other != "mask")
        raise ConfigError(f"{key}={name}: the data set's fields are {fields}")
    return batch[name]


class Classification:
    """Cross-entropy and accuracy.

    Args:
        input: field of the samples, any numeric dtype, shape (batch, ...).
        target: field of the classes, an integer dtype, shape (batch,).
        scale: factor from stored values to the model's input.
    """

    def __init__(self, input: str = "image", target: str = "label", scale: float = 1.0) -> None:
        self.input, self.target, self.scale = input, target, scale

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """See `Task`; samples whose mask is False count nothing."""
        mask = batch["mask"]
        target = field(batch, self.target, "task.target").long()
        logits = model(field(batch, self.input, "task.input").float() * self.scale)
        # In float32, whatever the products were computed in.
        losses = F.cross_entropy(logits.float(), target, reduction="none")
        hits = logits.argmax(-1) == target
        count = mask.sum()
        return {
            "loss": ((losses * mask).sum(), count),
            "accuracy": ((hits & mask).sum(), count),
        }
