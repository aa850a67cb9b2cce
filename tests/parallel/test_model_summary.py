"""The summary of a model is that of the whole model in every layout, and costs no memory."""

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.engine.layers.lora import add_adapters, freeze_base
from hpctrain.engine.parallel.preparing.summary import ModelSummary
from hpctrain.models import MLP, Transformer
from tests.parallel.parity import Cell, build
from tests.ranks import run_ranks


class Nested(nn.Module):
    """Lists in lists, a list of two kinds in turn, own parameters, a shared layer, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.pairs = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])] * 2)
        self.turns = nn.ModuleList(nn.Linear(6, 6 + i % 2) for i in range(8))
        self.maps = nn.ModuleDict({name: nn.Linear(7, 7) for name in "abcde"})
        self.again = self.turns[0]
        self.register_buffer("table", torch.zeros(1 << 20))


class Inner(nn.Module):
    """A model that a class wraps, as those of Hugging Face; its layers have long names."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        for i in range(layers):
            self.inner.add_module(
                f"a_layer_with_a_name_that_is_much_too_long_{i}", MLP(4, [i + 1], 2)
            )


def lora() -> nn.Module:
    model = Transformer(64, 32, 4, 4)
    add_adapters(model, ["*.query", "*.down"], 4, 8.0)
    freeze_base(model, ["norm.*"])
    return model


MODELS = {
    "one layer": lambda: nn.Linear(3, 4),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
    "nested": Nested,
    "inner": lambda: Inner(9),
    "many layers": lambda: Inner(60),
    "lora": lora,
    "nothing": nn.ReLU,
}


@pytest.mark.parametrize("name", MODELS)
def test_lines_add_up(name: str) -> None:
    model: nn.Module = MODELS[name]()
    summary = ModelSummary.of(model)
    parameters = list(model.parameters())
    assert summary.trained == sum(each.numel() for each in parameters if each.requires_grad)
    assert summary.parameters == sum(each.numel() for each in parameters)
    assert sum(line.number * line.parameters for line in summary.lines) == summary.parameters
    assert sum(line.number * line.bytes for line in summary.lines) == summary.bytes
    assert len(str(summary).splitlines()) <= 45


KEYS: dict[str, dict[str, Any]] = {
    "zero3": {"parallel.dp_replicate": 1, "parallel.dp_shard": -1},
    "tp": {"parallel.tp": 2},
    "pp": {"parallel.pp": 2, "train.accumulate": 2},
}
FROZEN = {
    "all": {},
    "frozen": {"optimizer.groups": ({"match": "layers.0.*", "freeze": True},)},
    "lora": {
        "train.lora.match": ("*.query",),
        "train.lora.rank": 4,
        "train.lora.also": ("norm.*",),
    },
}


def summaries(ranks: int, layouts: list[str]) -> list[tuple[str, int]]:
    """Return the summaries of all layouts, and the parameters that this rank really trains."""
    found = []
    for layout in layouts:
        for frozen in FROZEN.values():
            model = build(
                Cell("untied", ranks, tuple((KEYS.get(layout, {}) | frozen).items()))
            ).model
            found.append((str(model.summary), sum(p.numel() for p in model.parameters)))
    return found


def test_every_layout_has_the_summary_of_one_process() -> None:
    (expected,) = run_ranks(summaries, 1, 1, ["alone"])
    assert len({text for text, _ in expected}) == 3
    by_rank = run_ranks(summaries, 2, 2, [*KEYS])
    for found in by_rank:
        assert [text for text, _ in found] == [text for text, _ in expected] * len(KEYS)
    # The numbers of trained parameters are those that are trained; stages of a pipeline add up.
    trained = [count for _, count in expected]
    assert [count for _, count in by_rank[0]][:6] == trained * 2
    stages = zip(by_rank[0][6:], by_rank[1][6:], strict=True)
    assert [first + second for (_, first), (_, second) in stages] == trained
    for (text, count), frozen in zip(expected, FROZEN, strict=True):
        line = f"  {count:,} are trained, "
        assert (line in text) == (frozen != "all")
