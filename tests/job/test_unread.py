"""What a user's task cannot read is named: a field of the batch, or the outputs of the model."""

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.schema import Config
from hpctrain.job.unread import unread_problem
from hpctrain.shards.types import Batch
from hpctrain.tasks import SplitTask, Sums


class Mine(SplitTask):
    """A user's task, with the errors that users make."""

    def __init__(self, name: str) -> None:
        self.name = name

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch[self.name],)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        return {"loss": (outputs.float().sum(), batch["mask"].sum())}


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 1

    def wrong(self) -> None:
        raise KeyError("of something else")


def problem(work: Any) -> str:
    with pytest.raises((LookupError, AttributeError)) as caught:
        work()
    return unread_problem(caught.value, Config(task={"_target_": "mine.Mine"}))


def test_what_the_task_got_is_named() -> None:
    batch = {"temperature": torch.zeros(4), "u": torch.zeros(4), "mask": torch.ones(4).bool()}
    said = problem(lambda: Mine("temprature")(Two(), batch))
    assert said.startswith(
        "task._target_=mine.Mine asks the batch for 'temprature': did you mean 'temperature'? its "
        "fields are temperature, u, and mask ("
    )
    said = problem(lambda: Mine("u")(Two(), batch))
    assert said.startswith("task._target_=mine.Mine cannot read the model's outputs: 'tuple' obj")
    assert said.endswith("the model returned a tuple of float32 (4,), 1")
    assert problem(Two().wrong) == ""
    assert problem(lambda: torch.nope) == ""
