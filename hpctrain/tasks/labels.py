"""Labels outside their range, which would train or measure something else without a word.

on the CPU, and in the first batches on a GPU     an error names the value and its row
in later batches on a GPU                         the loss is NaN, which the host does not wait
for, and hpctrain.faults.health finds
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hpctrain.errors import ConfigError

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

    def outside(self, labels: torch.Tensor, count: int, whole: str) -> torch.Tensor:
        """Return which labels are outside their range, bool, in the shape of the labels.

        The labels, (rows, ...), are integers in [0, count), or a floating dtype from 0 to 1.
        `whole` says what has so many classes, for the error, which is raised if the host may wait
        for the device.
        """
        if labels.is_floating_point():
            wrong = ~((labels >= -_ROUNDED) & (labels <= 1 + _ROUNDED))  # NaN is outside, too
        else:
            wrong = (labels < 0) | (labels >= count)
        if self._looks(labels) and wrong.any():
            raise ConfigError(self._text(labels, wrong, count, whole))
        return wrong

    def _looks(self, labels: torch.Tensor) -> bool:
        if labels.device.type == "meta" or isinstance(labels, FakeTensor):  # without values
            return False
        training = torch.is_grad_enabled()
        is_first = self._left[training] > 0
        self._left[training] -= is_first
        return is_first or labels.device.type == "cpu"

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
