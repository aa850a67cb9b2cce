"""Classification of samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hpctrain.shards.types import Batch
from hpctrain.tasks.task import SplitTask, Sums, field


class Classification(SplitTask):
    """Cross-entropy and accuracy.

    Args:
        input: Field of the samples, any numeric dtype, shape (batch, ...).
        target: Field of the classes, an integer dtype, shape (batch,).
        scale: Factor from stored values to the model's input.
    """

    def __init__(self, input: str = "image", target: str = "label", scale: float = 1.0) -> None:
        self.input, self.target, self.scale = input, target, scale

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the scaled samples, float32 (batch, ...); see `SplitTask`."""
        field(batch, self.target, "task.target")  # before the model has worked in vain
        return (field(batch, self.input, "task.input").float() * self.scale,)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; samples whose mask is False do not count.

        Args:
            outputs: Logits, a floating dtype (batch, classes).
            batch: The batch.
        """
        mask, target = batch["mask"], field(batch, self.target, "task.target").long()
        # The loss is computed in float32 in every precision.
        losses = F.cross_entropy(outputs.float(), target, reduction="none")
        hits = outputs.argmax(-1) == target
        count = mask.sum()
        return {
            "loss": ((losses * mask).sum(), count),
            "accuracy": ((hits & mask).sum(), count),
        }
