"""What a user's task cannot read is named: a field of the batch, or the outputs of the model."""

import traceback
from operator import itemgetter
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


class Helped(Mine):
    """Lets functions read the batch and the outputs."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch["u"] if self.name == "u" else read(batch, self.name),)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        return {"loss": summed(outputs)}


class Own(Mine):
    """Has errors that have nothing to do with what it gets."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch["u"],)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        if self.name == "attribute":
            return self.nothing  # type: ignore[attr-defined, no-any-return]
        return outputs[0] * {}  # type: ignore[no-any-return]


class Table(Own):
    """Looks into a table of its own, while it has a batch."""

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        return {"loss": {"a": batch["mask"]}[self.name]}


def read(fields: Batch, name: str) -> torch.Tensor:
    return fields.pop(name) if name == "popped" else itemgetter(name)(fields)


def summed(given: Any) -> Any:
    return given["logits"]


class Named(nn.Module):
    """A model that looks into a dict of its own, or into the batch that its task gives it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"first": nn.Identity()})
        self.kind = kind

    def forward(self, x: Any) -> Any:
        if self.kind == "batch":
            return x["pressure"]
        return self.heads[self.kind](x) if self.kind else {"first": x}


class Whole(Mine):
    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        return model(batch)  # type: ignore[no-any-return]


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 1

    def wrong(self) -> None:
        raise KeyError("of something else")


def problem(work: Any) -> str:
    with pytest.raises((LookupError, AttributeError, TypeError)) as caught:
        work()
    frames = traceback.walk_tb(caught.value.__traceback__)
    tasks = [each for frame, _ in frames if isinstance(each := frame.f_locals.get("self"), Mine)]
    target = f"mine.{type(tasks[0]).__name__}" if tasks else "mine.Mine"
    return unread_problem(
        caught.value, Config(task={"_target_": target}, model={"_target_": "mine.Named"})
    )


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


def test_only_what_was_looked_into_is_blamed() -> None:
    batch = {"temperature": torch.zeros(4), "u": torch.zeros(4), "mask": torch.ones(4).bool()}
    for name in ("popped", "itemgotten"):
        said = problem(lambda name=name: Helped(name)(Two(), batch))
        assert said.startswith(f"task._target_=mine.Helped asks the batch for {name!r}: its fields")
    said = problem(lambda: Whole("")(Named("batch"), batch))
    assert said.startswith("model._target_=mine.Named asks the batch for 'pressure': its fields")
    assert problem(lambda: Mine("u")(Named("second"), batch)) == "", "it is the model's own dict"
    assert problem(lambda: Table("b")(Two(), batch)) == "", "it is the task's own dict"
    assert problem(lambda: Own("attribute")(Two(), batch)) == ""
    said = problem(lambda: Helped("u")(Named(), batch))
    assert "cannot read the model's outputs: 'logits' (" in said
    assert said.endswith("the model returned a dict of first: float32 (4,)")
    said = problem(lambda: Helped("u")(Two(), batch))
    assert "cannot read the model's outputs: tuple indices must be integers" in said
    assert problem(lambda: Own("operand")(nn.Identity(), batch)) == "", "the operand is the reason"
