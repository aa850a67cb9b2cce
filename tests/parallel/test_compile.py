"""torch.compile changes neither losses nor parameters."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hpctrain.config.schema import Config
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, difference, reference, results, spread
from tests.ranks import run_ranks

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


def outputs(mode: str, checkpointing: str) -> tuple[torch.Tensor, int]:
    """Return what two blocks return, and the number of functions that were compiled."""
    config = Config()
    config.train.compile, config.train.activation_checkpointing = mode, checkpointing
    model = spread(functools.partial(Net, Block(8, 8), Block(8, 8)), config)
    counters.clear()
    return model.module(torch.ones(2, 8)).detach(), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "checkpointing",
    [
        # torch's `checkpoint` is a function that the compiler may leave alone.
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("selective", marks=pytest.mark.slow),
    ],
)
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (eager, none), (compiled, some) = (
        run_ranks(outputs, 1, m, checkpointing, timeout=400)[0] for m in ("off", "blocks")
    )
    assert none == 0
    assert some > 0
    assert torch.allclose(eager, compiled)
    assert any(tmp_path.rglob("*.py")), "the cache is where it was asked for"


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
