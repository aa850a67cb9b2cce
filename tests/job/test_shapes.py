"""An error about shapes names the layer and the keys; any other error stays as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpctrain.config.schema import Config
from hpctrain.job.shapes import shape_problem
from hpctrain.models import MLP, ConvNet
from hpctrain.shards.types import Batch
from hpctrain.tasks import Classification, Sums
from tests.conftest import Completed, run_json, runs


class Net(nn.Module):
    """A user's model, which adds what does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) + torch.zeros(3, 7)


class Own(Classification):
    """A user's task, which computes its loss by itself."""

    def sums(self, outputs: torch.Tensor, batch: Batch) -> Sums:
        return {"loss": (F.cross_entropy(outputs, batch["label"]), batch["mask"].sum())}


def problem(model: nn.Module, work: Callable[[], object], **arguments: Any) -> str:
    """Return what is said about the error that the work raises."""
    config = Config(model={"_target_": "x.Y", **arguments}, task={"_target_": "x.Task"})
    with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
        work()
    return shape_problem(caught.value, config, model)


def test_the_layer_its_input_and_its_keys_are_named() -> None:
    images = torch.zeros(4, 1, 8, 8)
    mlp = MLP(63, [16], 10)
    assert problem(mlp, lambda: mlp(images), in_features=63, hidden=[16], out_features=10) == (
        "the layer 1 (Linear(in_features=63, out_features=16, bias=True)) got float32 (4, 64): "
        "mat1 and mat2 shapes cannot be multiplied (4x64 and 63x16); its sizes follow from "
        "model.in_features=63, model.hidden=[16]"
    )
    net = ConvNet(3, [8], 10)
    text = problem(net, lambda: net(images), in_channels=3, widths=[8], out_features=10, norm="x")
    assert text.startswith("the layer blocks.0.first (Conv2d(3, 8, ")
    assert text.endswith("; its sizes follow from model.in_channels=3, model.widths=[8]")
    wrapped = nn.ModuleDict({"module": checkpoint_wrapper(nn.Sequential(nn.Embedding(16, 8)))})
    tokens = torch.full((2, 4), 99)
    text = problem(wrapped, lambda: wrapped["module"](tokens), vocab_size=16, dim=8, tied=True)
    assert text.startswith(
        "the layer 0 (Embedding(16, 8)) got int64 (2, 4) with 99, and has rows for 0 to 15: index "
        "out of range in self; its sizes follow from model.vocab_size=16, model.dim=8\n"
    )


def test_the_loss_and_the_code_of_a_user() -> None:
    batch = {"image": torch.zeros(4, 64), "label": torch.arange(4) + 5}
    batch["mask"] = torch.ones(4, dtype=torch.bool)
    mlp = MLP(64, [], 5)
    text = problem(mlp, lambda: Own()(mlp, batch), in_features=64, out_features=5)
    assert text.startswith("the loss of task._target_=x.Task: Target ")
    assert "; the sizes of the model are model.in_features=64, model.out_features=5\n" in text
    assert 'F.cross_entropy(outputs, batch["label"])' in text
    net = Net()
    text = problem(net, lambda: net(torch.zeros(4, 64)), width=8)
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

    assert problem(nn.Linear(1, 1), work) == ""


def test_the_command_line_says_it(train: Callable[..., Completed], tmp_path: Path) -> None:
    done = train("model.in_features=63", "tracking=off", code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the layer 1 (Linear(in_features=63, out_features=256")
    assert "Traceback" not in done.stderr
    assert [run_json(run)["state"] for run in runs(tmp_path / "runs")] == ["failed"]
