"""An error in a task or a layer names what it got, and the keys; any other error stays as it is."""

import traceback
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpctrain.job.explain_error import explained
from hpctrain.models import MLP, ConvNet
from hpctrain.shards.types import Batch
from hpctrain.tasks import Classification, SplitTask, Sums
from tests.conftest import Completed, run_json, runs


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


def unread(work: Any) -> str:
    with pytest.raises((LookupError, AttributeError, TypeError)) as caught:
        work()
    frames = traceback.walk_tb(caught.value.__traceback__)
    tasks = [each for frame, _ in frames if isinstance(each := frame.f_locals.get("self"), Mine)]
    target = f"mine.{type(tasks[0]).__name__}" if tasks else "mine.Mine"
    nodes = {"task": {"_target_": target}, "model": {"_target_": "mine.Named"}}
    return explained(caught.value, nodes, nn.Identity())


def test_what_the_task_got_is_named() -> None:
    batch = {"temperature": torch.zeros(4), "u": torch.zeros(4), "mask": torch.ones(4).bool()}
    said = unread(lambda: Mine("temprature")(Two(), batch))
    assert said.startswith(
        "task._target_=mine.Mine asks the batch for 'temprature': did you mean 'temperature'? its "
        "fields are temperature, u, and mask ("
    )
    said = unread(lambda: Mine("u")(Two(), batch))
    assert said.startswith("task._target_=mine.Mine cannot read the model's outputs: 'tuple' obj")
    assert said.endswith("the model returned a tuple of float32 (4,), 1")
    assert unread(Two().wrong) == ""
    assert unread(lambda: torch.nope) == ""


def test_only_what_was_looked_into_is_blamed() -> None:
    batch = {"temperature": torch.zeros(4), "u": torch.zeros(4), "mask": torch.ones(4).bool()}
    for name in ("popped", "itemgotten"):
        said = unread(lambda name=name: Helped(name)(Two(), batch))
        assert said.startswith(f"task._target_=mine.Helped asks the batch for {name!r}: its fields")
    said = unread(lambda: Whole("")(Named("batch"), batch))
    assert said.startswith("model._target_=mine.Named asks the batch for 'pressure': its fields")
    assert unread(lambda: Mine("u")(Named("second"), batch)) == "", "it is the model's own dict"
    assert unread(lambda: Table("b")(Two(), batch)) == "", "it is the task's own dict"
    assert unread(lambda: Own("attribute")(Two(), batch)) == ""
    said = unread(lambda: Helped("u")(Named(), batch))
    assert "cannot read the model's outputs: 'logits' (" in said
    assert said.endswith("the model returned a dict of first: float32 (4,)")
    said = unread(lambda: Helped("u")(Two(), batch))
    assert "cannot read the model's outputs: tuple indices must be integers" in said
    assert unread(lambda: Own("operand")(nn.Identity(), batch)) == "", "the operand is the reason"


class Net(nn.Module):
    """A user's model, which adds what does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) + torch.zeros(3, 7)


class CrossEntropy(Classification):
    """A user's task, which computes its loss by itself."""

    def sums(self, outputs: torch.Tensor, batch: Batch) -> Sums:
        return {"loss": (F.cross_entropy(outputs, batch["label"]), batch["mask"].sum())}


def misshaped(model: nn.Module, work: Callable[[], object], **arguments: Any) -> str:
    """Return what is said about the error that the work raises."""
    nodes = {"model": {"_target_": "x.Y", **arguments}, "task": {"_target_": "x.Task"}}
    with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
        work()
    return explained(caught.value, nodes, model)


def test_the_layer_its_input_and_its_keys_are_named() -> None:
    images = torch.zeros(4, 1, 8, 8)
    mlp = MLP(63, [16], 10)
    assert misshaped(mlp, lambda: mlp(images), in_features=63, hidden=[16], out_features=10) == (
        "the layer 1 (Linear(in_features=63, out_features=16, bias=True)) got float32 (4, 64): "
        "mat1 and mat2 shapes cannot be multiplied (4x64 and 63x16); its sizes follow from "
        "model.in_features=63, model.hidden=[16]"
    )
    net = ConvNet(3, [8], 10)
    text = misshaped(net, lambda: net(images), in_channels=3, widths=[8], out_features=10, norm="x")
    assert text.startswith("the layer blocks.0.first (Conv2d(3, 8, ")
    assert text.endswith("; its sizes follow from model.in_channels=3, model.widths=[8]")
    wrapped = nn.ModuleDict({"module": checkpoint_wrapper(nn.Sequential(nn.Embedding(16, 8)))})
    tokens = torch.full((2, 4), 99)
    text = misshaped(wrapped, lambda: wrapped["module"](tokens), vocab_size=16, dim=8, tied=True)
    assert text.startswith(
        "the layer 0 (Embedding(16, 8)) got int64 (2, 4) with 99, and has rows for 0 to 15: index "
        "out of range in self; its sizes follow from model.vocab_size=16, model.dim=8\n"
    )


def test_the_loss_and_the_code_of_a_user() -> None:
    batch = {"image": torch.zeros(4, 64), "label": torch.arange(4) + 5}
    batch["mask"] = torch.ones(4, dtype=torch.bool)
    mlp = MLP(64, [], 5)
    text = misshaped(mlp, lambda: CrossEntropy()(mlp, batch), in_features=64, out_features=5)
    assert text.startswith("the loss of task._target_=x.Task: Target ")
    assert "; the sizes of the model are model.in_features=64, model.out_features=5\n" in text
    assert 'F.cross_entropy(outputs, batch["label"])' in text
    net = Net()
    text = misshaped(net, lambda: net(torch.zeros(4, 64)), width=8)
    assert text.startswith("the model (Net) got float32 (4, 64): The size of tensor a (10) must")
    assert "model.width=8\n" in text
    assert "return self.head(x.flatten(1)) + torch.zeros(3, 7)" in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected scalar type Float but found Half"),
        RuntimeError("[pair.cc:1] Connection closed by peer: shapes of 2 ranks"),
        ValueError("sizes of something else"),  # neither in the model nor in a task
    ],
)
def test_any_other_error_stays(error: Exception) -> None:
    def work() -> None:
        raise error

    assert misshaped(nn.Linear(1, 1), work) == ""


def test_the_command_line_says_it(train: Callable[..., Completed], tmp_path: Path) -> None:
    done = train("model.in_features=63", "tracking=off", code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the layer 1 (Linear(in_features=63, out_features=256")
    assert "Traceback" not in done.stderr
    assert [run_json(run)["state"] for run in runs(tmp_path / "runs")] == ["failed"]
