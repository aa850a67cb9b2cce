"""Tasks: what a model is trained for. A task turns a batch into sums.

A task returns *sums and counts*, never means: `{"loss": (sum, count), "accuracy": (sum, count)}`.
The trainer adds them over micro-batches and ranks and divides once. So accumulation, DDP and a
padded last batch give the same numbers as one process. The gradient is that of `"loss"`.
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
    """A callable that returns the same names in the same order on every call."""

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Run the model on a batch, which is on the model's device; return sums and counts."""
        ...


def field(batch: Batch, name: str, key: str) -> torch.Tensor:
    """Return the field `name` of the batch.

    Args:
        batch: Field name to tensor.
        name: Name of the field.
        key: Config key that holds the name, for the error.

    Raises:
        ConfigError: The data set has no such field.
    """
    if name not in batch:
        fields = ", ".join(other for other in batch if other != "mask")
        raise ConfigError(f"{key}={name}: the data set's fields are {fields}")
    return batch[name]


class Classification:
    """Cross-entropy and accuracy.

    Args:
        input: Field of the samples, any numeric dtype, shape (batch, ...).
        target: Field of the classes, an integer dtype, shape (batch,).
        scale: Factor from stored values to the model's input.
    """

    def __init__(self, input: str = "image", target: str = "label", scale: float = 1.0) -> None:
        self.input, self.target, self.scale = input, target, scale

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the sums of a `Task`; samples whose mask is False do not count."""
        mask = batch["mask"]
        target = field(batch, self.target, "task.target").long()
        logits = model(field(batch, self.input, "task.input").float() * self.scale)
        # The loss is computed in float32 in every precision.
        losses = F.cross_entropy(logits.float(), target, reduction="none")
        hits = logits.argmax(-1) == target
        count = mask.sum()
        return {
            "loss": ((losses * mask).sum(), count),
            "accuracy": ((hits & mask).sum(), count),
        }
