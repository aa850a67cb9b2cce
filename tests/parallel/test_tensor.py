"""Tensor parallel gives the results of one process."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan
from hpctrain.errors import ConfigError
from hpctrain.models import MLP, Transformer
from hpctrain.tasks import Classification, LanguageModel
from tests.bounds import EXACT, within
from tests.parallel import parity
from tests.parallel.parity import Cell, Cells, Result, build, check_equal, difference, reference
from tests.ranks import run_ranks

SHARD = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "train.accumulate": 2}
SHORT = {"sp": "parallel.sequence_parallel", "loss": "parallel.loss_parallel"}


def cell(model: str, ranks: int, keys: dict[str, Any] | None = None, **short: Any) -> Cell:
    given = {"parallel.tp": 2} | (keys or {}) | {SHORT[name]: v for name, v in short.items()}
    return Cell(model, ranks, tuple(given.items()))


COVERING = [
    cell("transformer", 2, {"train.accumulate": 2}),
    cell("gpt", 2, sp=False, loss=False),
    cell("untied", 2, {"train.activation_checkpointing": "selective"}, loss=False),
    cell("uneven", 4, SHARD),
]
MORE = [
    cell("transformer", 4),
    cell("gpt", 4, SHARD | {"parallel.zero": 1}),
    cell("untied", 4, SHARD),
    *(
        cell(model, 2, sp=sp, loss=loss)
        for model in ("transformer", "untied", "gpt")
        for sp in (True, False)
        for loss in (True, False)
    ),
    cell("transformer", 4, SHARD | {"parallel.zero": 2}),
    cell("transformer", 4, SHARD | {"parallel.fsdp.offload": True}),
    cell("untied", 4, {"parallel.sync": "every", "train.accumulate": 2}),
    cell("untied", 4, {"parallel.tp": 2, "parallel.dp_shard": 2}, sp=False),
    cell("gpt", 4, {"parallel.tp": 4}),
    cell("gpt", 8, {"parallel.tp": 2, "parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
]


CELLS = Cells(COVERING, MORE)


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_equal_to_one_process(cell: Cell) -> None:
    check_equal(cell, CELLS[cell])


class Dropping(nn.Module):
    """Layers whose divided parts come together before each dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 32), "down": nn.Linear(32, 64)}) for _ in range(2)
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + self.drop(block["down"](block["up"](x).relu()))
        out: torch.Tensor = self.head(x)
        return out


DROPPING: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "conv, dropping": (
        Dropping,
        functools.partial(Classification, scale=1 / 16),
        {"parallel.plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
    ),
    "dropping": (functools.partial(Transformer, 64, 32, 3, 4, 2, dropout=0.2), LanguageModel, {}),
}


def dropped(ranks: int) -> list[Result]:
    seen = []
    for name, (model, task, keys) in DROPPING.items():
        parity.MODELS[name], parity.TASKS[name] = model, task
        one = cell(name, ranks, {"parallel.tp": ranks} | keys)
        training = build(one)
        torch.manual_seed(1 + training.mesh.stream)  # the job does so
        training.run(one, one.steps)
        seen.append(Result(training.losses, training.norms, parity.whole(training.model)))
    return seen


def test_dropout_gives_the_results_of_one_process() -> None:
    (alone,) = run_ranks(dropped, 1, 1)
    for seen in run_ranks(dropped, 2, 2):
        for result, expected in zip(seen, alone, strict=True):
            within(difference(result, expected), EXACT)
    with_dropout, without = alone[1].losses, reference("untied").losses
    assert abs(with_dropout[0] - without[0]) > 1e-4


def plan_of(model: nn.Module, tp: int = 1, **keys: Any) -> None:
    find_plan(model, ParallelConfig(tp=tp, **keys), Degrees(tp=tp))


@pytest.mark.parametrize(
    ("tp", "keys", "text"),
    [
        (2, {}, "parallel.tp=2: MLP has no plan for tensor parallel; give the styles"),
        (2, {"plan": {"nope.*": "colwise"}}, "MLP has no module nope.*; its linear layers are 1"),
        (2, {"plan": {"2": "colwise"}}, "2=colwise: 2 is a ReLU; this style divides a torch.nn.L"),
        (3, {"plan": {"1": "colwise"}}, "parallel.tp=3 does not divide the 16 outputs of 1"),
    ],
)
def test_bad_plans(tp: int, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(MLP(64, [16], 10), tp, **keys)
    assert text in str(error.value)


def test_other_degrees_need_a_plan() -> None:
    mlp = MLP(64, [16], 10)
    with pytest.raises(ConfigError, match=r"parallel\.pp=2: MLP has no plan for pipeline parallel"):
        find_plan(mlp, ParallelConfig(pp=2), Degrees(pp=2))
    with pytest.raises(ConfigError, match=r"parallel\.cp=2: MLP has no plan for context parallel"):
        find_plan(mlp, ParallelConfig(cp=2), Degrees(cp=2))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="tp=4 does not divide kv_heads=2: use 2"):
        plan_of(Transformer(64, 32, 2, 4, 2), 4)
    with pytest.raises(ConfigError, match="tp=3 does not divide heads=8: use 2 or 4"):
        plan_of(Transformer(64, 32, 2, 8, 4, hidden=96), 3)


class FrozenNorms(Transformer):
    """A model that freezes its norms itself."""

    def __init__(self) -> None:
        super().__init__(61, 32, 2, 4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" not in name)


def trained_names(tp: int) -> list[str]:
    parity.MODELS["frozen norms"] = FrozenNorms
    parity.TASKS["frozen norms"] = LanguageModel
    return sorted(build(cell("frozen norms", tp, {"parallel.tp": tp})).model.names)


def test_what_a_model_freezes_itself_stays_frozen() -> None:
    """torch makes new parameters of the norms between divided layers."""
    (alone,) = run_ranks(trained_names, 1, 1)
    assert alone
    assert not any("norm" in name for name in alone)
    assert run_ranks(trained_names, 2, 2) == [alone, alone]
