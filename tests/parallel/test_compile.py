"""torch.compile changes neither losses nor parameters."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hpctrain.config.schema import Config
from hpctrain.engine.parallel import changes
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, difference, reference, results, spread
from tests.ranks import run_ranks

Outputs = tuple[torch.Tensor, int]
ZERO3 = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
FULL = {"train.activation_checkpointing": "full"}


def check(model: str, ranks: int, keys: dict[str, Any]) -> None:
    cell = Cell(model, ranks, tuple(keys.items()))
    for result in results((cell,))[cell]:
        within(difference(result, reference(model)), EXACT)


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


def of_torch() -> nn.Module:
    """Return a block that is a class of torch."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def outputs(mode: str, checkpointing: str, block: Callable[[], nn.Module]) -> Outputs:
    """Return what two blocks return, and the number of functions that were compiled."""
    config = Config()
    config.train.compile, config.train.activation_checkpointing = mode, checkpointing
    model = spread(functools.partial(Net, block(), block()), config)
    counters.clear()
    return model.module(torch.ones(2, 8)).detach(), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("block", [functools.partial(Block, 8, 8), of_torch])
# torch's `checkpoint` and what its own classes do the compiler may leave alone.
@pytest.mark.parametrize("checkpointing", ["full", "none", "selective"])
def test_blocks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: str,
    block: Callable[[], nn.Module],
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (eager, none), (compiled, some) = (
        run_ranks(outputs, 1, m, checkpointing, block, timeout=400)[0] for m in ("off", "blocks")
    )
    assert none == 0
    assert some > 0
    assert torch.allclose(eager, compiled)
    assert any(tmp_path.rglob("*.py")), "the cache is where it was asked for"


def test_what_torch_leaves_alone_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = list[bool]()

    def compile_(_: nn.Module) -> None:
        wrapped.append(torch._dynamo.config.wrap_top_frame)

    monkeypatch.setattr(nn.Module, "compile", compile_)
    monkeypatch.setattr(changes.dist, "get_rank", lambda: 0)
    changes._compile([of_torch(), Block(8, 8)], False)
    changes._compile([Block(8, 8)], True)
    assert (wrapped, caplog.messages) == ([True, False, False], [])
    changes._compile([of_torch(), of_torch(), Block(8, 8)], True)
    assert wrapped[3:] == [False, False, False]
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "train.compile has no effect on Sequential"
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["transformer", "conv"])
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (1, {"train.compile": "model"}),
        (2, {"train.compile": "model"}),
        (2, {"train.compile": "blocks"} | ZERO3),
        (2, {"train.compile": "blocks"} | FULL | ZERO3),
    ],
)
def test_models(model: str, ranks: int, keys: dict[str, Any]) -> None:
    check(model, ranks, keys)
