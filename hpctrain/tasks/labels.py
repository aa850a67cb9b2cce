"""Labels outside their range, which would train or measure something else without a word.

on the CPU, and in the first batches on a GPU     an error names the value and its row
in later batches on a GPU                         the loss is not finite, which the host does not
wait for, and hpctrain.engine.faults.health finds
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import SplitTask, described
from hpctrain.tasks.batches import field, in_default_dtype

_FIRST = 8  # batches, or micro-batches
_ROUNDED = 1e-2  # probabilities that were mixed in bf16


class Labels:
    """Finds the labels of a field that are outside their range.

    `cure` says what to do about a label that shall not count; "VALUE" stands for it.
    """

    def __init__(self, key: str, name: str, cure: str = "") -> None:
        self._named, self._cure = f"{key}={name}", cure
        # Those of an evaluation are others.
        self._left = {True: _FIRST, False: _FIRST}

    def outside(self, labels: torch.Tensor, count: int, whole: str) -> torch.Tensor | None:
        """Return which labels are outside their range, bool, in the shape of the labels.

        None: the host knows that there are none. The labels, (rows, ...), are integers in
        [0, count), or a floating dtype from 0 to 1. `whole` says what has so many classes, for the
        error, which is raised if the host may wait for the device.
        """
        if not self._looks(labels):
            return _outside(labels, count)
        self._check(labels, count, whole)
        return None

    def inside(
        self, labels: torch.Tensor, count: int, whole: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return integer labels with others in place of those outside, and which were inside.

        None: the host knows that all were. The loss is to be divided by what were inside: then it
        is not finite where one was not, by two kernels instead of five.
        """
        if self._looks(labels):
            self._check(labels, count, whole)
            return labels, None
        known = labels.clamp(0, count - 1)
        return known, known == labels

    def _check(self, labels: torch.Tensor, count: int, whole: str) -> None:
        if labels.numel():  # one operation tells of all of them; a NaN makes both numbers NaN
            lowest, highest = (each.item() for each in labels.aminmax())
            most, by = (1, _ROUNDED) if labels.is_floating_point() else (count - 1, 0)
            if not (lowest >= -by and highest <= most + by):
                wrong = _outside(labels, count)
                raise ConfigError(self._text(labels, wrong, count, whole))

    def _looks(self, labels: torch.Tensor) -> bool:
        if isinstance(labels, FakeTensor):  # without values
            return False
        if labels.is_cpu:
            return True
        training = torch.is_grad_enabled()
        is_first = self._left[training] > 0 and not labels.is_meta
        self._left[training] -= is_first
        return is_first

    def _text(self, labels: torch.Tensor, wrong: torch.Tensor, count: int, whole: str) -> str:
        row, *place = wrong.nonzero()[0].tolist()
        value = labels[(row, *place)].item()
        where = f", position {', '.join(map(str, place))}" if place else ""
        more = int(wrong.sum()) - 1
        also = f", and {more} more are outside" if more else ""
        highest = 1 if labels.is_floating_point() else count - 1
        hint = " Are they counted from 1?" if value == count else ""
        cure = f" {self._cure.replace('VALUE', f'{value:g}')}" if self._cure else ""
        return (
            f"{self._named}: row {row} of {len(labels)}{where} is {value:g}{also}, but {whole}: "
            f"labels are 0 to {highest}.{hint}{cure}"
        )


def _outside(labels: torch.Tensor, count: int) -> torch.Tensor:
    if labels.is_floating_point():
        return ~((labels >= -_ROUNDED) & (labels <= 1 + _ROUNDED))  # NaN is outside, too
    return (labels < 0) | (labels >= count)


class LabelTask(SplitTask):
    """A task with labels: its fields and their scale, and which labels count, and how much."""

    def __init__(
        self,
        input: str,
        target: str,
        scale: float,
        ignore: int | None,
        weights: torch.Tensor | None,
        metrics: Mapping[str, Any] | None,
    ) -> None:
        self.input, self.target, self.scale, self.ignore = input, target, scale, ignore
        self.metrics, self._weights = metrics or {}, weights
        cure = "task.ignore=VALUE leaves such labels out" if ignore is None else ""
        self._labels = Labels("task.target", target, cure)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the scaled samples, float32 (batch, ...); see `SplitTask`."""
        return (in_default_dtype(field(batch, self.input, "task.input")) * self.scale,)

    def _counted(self, labels: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the labels, with 0 in place of those that are ignored, and which of them count."""
        counted = batch["mask"]
        if labels.dim() > 1:
            counted = counted.view(-1, *[1] * (labels.dim() - 1)).expand_as(labels)
        if self.ignore is None:
            return labels, counted
        known = labels != self.ignore
        return torch.where(known, labels, 0), counted & known

    def _weights_of(self, logits: torch.Tensor, count: int, key: str, many: str) -> torch.Tensor:
        """Return the weights, of which there must be `count`, on the device of the logits."""
        assert self._weights is not None
        if len(self._weights) != count:
            raise ConfigError(
                f"task.{key} has {len(self._weights)} numbers, but the model returned "
                f"{described(logits)}, with {count} {many}: give one for each of them"
            )
        self._weights = self._weights.to(logits)
        return self._weights
