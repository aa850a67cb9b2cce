"""Classification: one class of each sample, or of each pixel of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import Sums, described
from hpctrain.tasks.batches import field, in_default_dtype, number_of, prediction
from hpctrain.tasks.labels import LabelTask


class Classification(LabelTask):
    """Cross-entropy and accuracy.

    The sums are `loss`, `accuracy`, and `topK_accuracy` for each K of `top_k`: how often the right
    class is among the K most probable ones. Targets with a probability for each class, as mixup
    makes them, count as right where the most probable class is met.

    Args:
        input: Field of the samples, any numeric dtype, shape (batch, ...).
        target: Field of the classes: an integer dtype, shape (batch,), or (batch, ...) with one
            class for each pixel. Or of their probabilities: a floating dtype, shape
            (batch, classes).
        scale: Factor from stored values to the model's input.
        class_weights: A weight of each class in the loss, which is sum(weight x loss) /
            sum(weight), as that of torch.nn.CrossEntropyLoss.
        label_smoothing: The part of each target that is spread evenly over all classes, 0 to 1
            (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision").
        top_k: The numbers K.
        ignore: A class that does not count, such as 255 for pixels without a label.
        metrics: Metrics of torchmetrics by name, for the evaluation. They get the probabilities,
            float32 (batch, classes, ...), and the targets.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        input: str = "image",
        target: str = "label",
        scale: float = 1.0,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        top_k: Sequence[int] = (),
        ignore: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}: it is at least 0 and below 1")
        if any(k < 1 for k in top_k):
            raise ValueError(f"top_k={[*top_k]}: each is 1 or more")
        weights = None if class_weights is None else _weights(class_weights)
        super().__init__(input, target, scale, ignore, weights, metrics)
        self.label_smoothing, self.top_k = label_smoothing, tuple(top_k)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; samples whose mask is False do not count.

        The outputs are logits, a floating dtype (batch, classes, ...).
        """
        # The loss is computed in float32, or in float64, in every precision.
        logits, target = self._read(outputs, batch)
        kinds = logits.shape[1]
        weights = None
        if self._weights is not None:
            weights = self._weights_of(logits, kinds, "class_weights", "classes")
        right: torch.Tensor | None = None
        if target.is_floating_point():
            wrong = self._labels.outside(target, kinds, "they are probabilities")
            target = target if wrong is None else torch.where(wrong, torch.nan, target)
            classes, counted, weight = target.argmax(1), batch["mask"], batch["mask"]
        else:
            target, counted = self._counted(target, batch)
            target, right = self._labels.inside(
                target, kinds, f"the model returned {kinds} classes"
            )
            classes, weight = target, counted if weights is None else weights[target] * counted
        losses = F.cross_entropy(
            *(logits, target, weights), reduction="none", label_smoothing=self.label_smoothing
        )
        total = (losses * (counted if right is None else counted / right)).sum()
        count = number_of(counted)
        sums = {
            "loss": (total, count if weight is counted else weight.sum()),
            "accuracy": (number_of((logits.argmax(1) == classes) & counted), count),
        }
        if self.top_k:
            # The classes that have a larger logit than the right one: fewer than K of them.
            rank = (logits > logits.gather(1, classes.unsqueeze(1))).sum(1)
            sums |= {
                f"top{k}_accuracy": (number_of((rank < k) & counted), count) for k in self.top_k
            }
        return sums

    def measured(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the probabilities, float32 (batch, classes, ...), and the targets."""
        logits, target = self._read(outputs, batch)
        return logits.softmax(1), target

    def _read(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, float32, and the targets, int64 or float32."""
        logits = prediction(outputs, "logits (batch, classes)")
        target = field(batch, self.target, "task.target")
        kinds = logits.shape[:1] + logits.shape[2:]
        fits = logits.shape if target.is_floating_point() else kinds
        if logits.dim() < 2 or target.shape != fits:
            raise ConfigError(
                f"the model returned {described(logits)} for task.target={self.target}, which is "
                f"{described(target)}: logits are (batch, classes, ...), and targets are integers "
                "(batch, ...) or probabilities (batch, classes)"
            )
        classes = in_default_dtype(target) if target.is_floating_point() else target.long()
        return in_default_dtype(logits), classes


def _weights(class_weights: Sequence[float]) -> torch.Tensor:
    weights = torch.tensor(class_weights, dtype=torch.float64)
    if not weights.isfinite().all() or (weights < 0).any() or not weights.any():
        raise ValueError(f"class_weights={[*class_weights]}: 0 or more, and one of them above 0")
    return weights
