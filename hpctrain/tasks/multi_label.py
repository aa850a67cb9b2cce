"""Multi-label classification: any number of labels of each sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import Sums, described
from hpctrain.tasks.batches import field, in_default_dtype, number_of, prediction
from hpctrain.tasks.labels import LabelTask


class MultiLabel(LabelTask):
    """Binary cross-entropy of each label; also for one label, yes or no.

    The sums are `loss`, and over all labels together (micro averages) `accuracy`, `precision`,
    `recall` and `f1`. A label is predicted when its probability is above the threshold.

    Args:
        input: Field of the samples, any numeric dtype, shape (batch, ...).
        target: Field of the labels, 0 or 1, any dtype, shape (batch, labels) or (batch,).
        scale: Factor from stored values to the model's input.
        positive_weights: A weight of each label where it is 1, for labels that are rare: the number
            of samples without it divided by the number of samples with it balances both.
        threshold: The threshold, above 0 and below 1.
        ignore: A label that does not count, such as -1 where nobody knows.
        metrics: Metrics of torchmetrics by name, for the evaluation. They get the probabilities,
            float32, and the labels, int64, both in the shape of the target.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        input: str = "image",
        target: str = "label",
        scale: float = 1.0,
        positive_weights: Sequence[float] | None = None,
        threshold: float = 0.5,
        ignore: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold={threshold}: it is above 0 and below 1")
        if positive_weights is not None and not all(weight > 0 for weight in positive_weights):
            raise ValueError(f"positive_weights={[*positive_weights]}: each is above 0")
        weights = None if positive_weights is None else torch.tensor(positive_weights)
        super().__init__(input, target, scale, ignore, weights, metrics)
        self.threshold = threshold

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; samples whose mask is False do not count.

        The outputs are logits, a floating dtype, in the shape of the target; (batch, 1) for
        (batch,).
        """
        logits, labels = self._read(outputs, batch)
        number = logits.shape[1] if logits.dim() > 1 else 1
        weights = None
        if self._weights is not None:
            weights = self._weights_of(logits, number, "positive_weights", "labels")
        labels, counted = self._counted(labels, batch)
        # torch computes with any number, so that a loss may even be negative.
        wrong = self._labels.outside(labels, 2, "each is there or not")
        losses = F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none", pos_weight=weights
        )
        losses = losses if wrong is None else torch.where(wrong, torch.nan, losses)
        found, there = (logits.sigmoid() > self.threshold) & counted, (labels > 0) & counted
        right, found_sum, there_sum = map(number_of, (found & there, found, there))
        count = number_of(counted)
        return {
            "loss": (torch.where(counted, losses, 0.0).sum(), count),
            "accuracy": (number_of((found == there) & counted), count),
            "precision": (right, found_sum),
            "recall": (right, there_sum),
            "f1": (2 * right, found_sum + there_sum),
        }

    def measured(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the probabilities, float32, and the labels, int64."""
        logits, labels = self._read(outputs, batch)
        return logits.sigmoid(), labels.long()

    def _read(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, float32, and the labels, int64 or a floating dtype."""
        logits = prediction(outputs, "logits (batch, labels)")
        labels = field(batch, self.target, "task.target")
        shaped = logits.squeeze(-1) if labels.dim() == 1 and logits.dim() == 2 else logits
        if shaped.shape != labels.shape:
            raise ConfigError(
                f"the model returned {described(logits)} for task.target={self.target}, which is "
                f"{described(labels)}: a logit for each label is needed"
            )
        return in_default_dtype(shaped), labels if labels.is_floating_point() else labels.long()
