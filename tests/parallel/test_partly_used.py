"""Parameters and blocks that only some ranks use are trained as on one process."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from tests.bounds import EXACT, within
from tests.parallel.parity import FP64, Result, difference, either, spread, whole
from tests.parallel.partly_used import Heads, Odd, Ordered, RowLosses, Skipping, Tuned
from tests.ranks import RanksError, run_ranks
from tests.steps import config_with, here, step_of

ROWS, STEPS, SAVED = 8, 4, 2
# The kinds of the rows in each step. Rows of kind N use head N, and skip block N.
KINDS: dict[str, list[list[int]]] = {
    "halves": [[0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]] * 2,
    "one": [[0] * 8] * 4,
    "never": [[9] * 8] * 4,
    "late": [[9] * 8, [9] * 8, [1, 1, 1, 1, 9, 9, 9, 9], [9, 9, 9, 9, 3, 3, 3, 3]],
    "first and last": [[0, 0, 0, 0, 9, 9, 9, 9], [3, 3, 3, 3, 0, 0, 0, 0]] * 2,
    "all": [[2] * 8, [2] * 8, [9] * 8, [0, 0, 2, 2, 2, 2, 1, 1]],
    "again on one rank": [[9] * 8, [9, 9, 9, 9, 8, 8, 8, 8], [7, 7, 7, 7, 8, 8, 8, 8], [9] * 8],
    "another order": [[9] * 8, [7] * 8, [9] * 8, [9] * 8],
}
HOW = (
    "plain",
    "in a dict",
    "in a tuple",
    "in a dataclass",
    "hidden",
    "twice",
    "detached",
    "a view",
    "changed",
    "a view that is changed",
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "heads": functools.partial(Heads, unused=True),
    "unequal heads": functools.partial(Heads, (5, 7)),
    "skipping": Skipping,
    "skipping, each twice": functools.partial(Skipping, 2),
    "skipping, no_grad": functools.partial(Skipping, encoder=2),
    "skipping, thawing": functools.partial(Skipping, encoder=2, thaws=2),
    "odd": Odd,
    "ordered": Ordered,
    **{f"tuned, {how}": functools.partial(Tuned, how) for how in HOW},
    "all trained, a view that is changed": functools.partial(Tuned, "a view that is changed", 0),
}
SHARDED = {"dp_replicate": 1, "dp_shard": -1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {"ddp.find_unused_parameters": True}),
    "zero1": (2, SHARDED | {"zero": 1}),
    "zero2": (2, SHARDED | {"zero": 2}),
    "zero3": (2, SHARDED),
    "weights": (2, SHARDED | {"zero": 1, "weights": [3, 1]}),
    "agree": (2, SHARDED | {"fsdp.agree": True}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


class Case(NamedTuple):
    """A training: names of the dicts above."""

    model: str
    kinds: str
    layout: str = "single"
    accumulate: int = 1
    optimizer: str = "sgd"

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = [
    *(Case("heads", "halves", layout) for layout in ("zero1", "zero2", "zero3", "hsdp")),
    Case("heads", "one", "zero1", 2, "adamw"),
    Case("unequal heads", "halves", "zero1"),
    Case("unequal heads", "one", "zero3", 1, "adamw"),
    *(Case("skipping", "halves", layout, 2) for layout in ("zero1", "zero2", "zero3")),
    Case("skipping", "late", "zero3"),
    Case("skipping", "first and last", "zero3"),
    Case("skipping", "all", "zero3", 1, "adamw"),
    Case("skipping", "first and last", "hsdp"),
    Case("skipping, each twice", "late", "zero1", 2),
    Case("skipping, each twice", "first and last", "zero3"),
    Case("skipping, each twice", "never", "weights"),
    Case("ordered", "again on one rank", "agree"),
    Case("skipping, no_grad", "first and last", "zero3"),
    Case("skipping, no_grad", "late", "zero3", 2),
    Case("skipping, thawing", "never", "zero3"),
    Case("skipping, thawing", "first and last", "zero3"),
    Case("skipping, thawing", "first and last", "agree"),
    Case("all trained, a view that is changed", "never", "zero3"),
    *(Case(f"tuned, {how}", "never", "zero3") for how in HOW),
    *(Case(f"tuned, {how}", "never", "zero1", 2) for how in ("plain", "twice")),
    *(Case("odd", "never", layout) for layout in ("zero1", "zero3", "hsdp")),
]


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Weight decay changes a parameter whose gradient is zero, and not one without a gradient.
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(parameters, weight_decay=0.1, eps=1e-4)


def train(case: Case, save: Path | None = None, load: Path | None = None) -> Result:
    """Train; save after some steps, or go on from there."""
    keys = {f"parallel.{key}": value for key, value in LAYOUTS[case.layout][1].items()}
    keys |= FP64 | {"train.accumulate": case.accumulate}
    model = spread(MODELS[case.model], config_with(keys))
    mesh = model.mesh
    optimizer = _optimizer(case.optimizer, model.parameters)
    step = step_of(model, RowLosses(), optimizer, clip_norm=0.5)
    checkpoints = Checkpointer(save or load or Path(), 2, here(), model, optimizer)
    if load:
        assert checkpoints.load_latest() == {"step": SAVED}
    losses, norms = [], []
    share = ROWS // mesh.shares
    mine = slice(mesh.first_share * share, (mesh.first_share + mesh.weight) * share)
    for number in range(SAVED if load else 0, STEPS):
        draw = torch.Generator().manual_seed(number)
        batch = {
            "x": torch.randn(ROWS, 8, generator=draw),
            "kind": torch.tensor(KINDS[case.kinds][number]),
            "mask": torch.ones(ROWS, dtype=torch.bool),
        }
        step(
            {name: value[mine] for name, value in batch.items()},
            0.1 if case.optimizer == "sgd" else 1e-2,
        )
        losses.append(step.totals.means()["loss"])
        norms.append(float(step.grad_norm))
        if save and number == SAVED - 1:
            checkpoints.save(SAVED, {"step": SAVED})
    return Result(losses, norms, whole(model))


def train_all(cases: list[Case]) -> list[Result]:
    return [train(case) for case in cases]


@functools.cache
def alone() -> dict[Case, Result]:
    cases = sorted({Case(c.model, c.kinds, optimizer=c.optimizer) for c in CASES})
    (answer,) = run_ranks(train_all, 1, cases)
    return dict(zip(cases, answer, strict=True))


@functools.cache
def trained(ranks: int) -> dict[Case, list[Result]]:
    cases = [case for case in CASES if LAYOUTS[case.layout][0] == ranks]
    answers = run_ranks(train_all, ranks, cases)
    return {case: [answer[i] for answer in answers] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_one_process(case: Case) -> None:
    kinds = "never" if case.model == "ordered" else case.kinds
    expected = alone()[Case(case.model, case.kinds, optimizer=case.optimizer)]
    if kinds == case.kinds:
        for result in trained(LAYOUTS[case.layout][0])[case]:
            within(difference(result, expected), EXACT)
        return
    # One process would take one order for all rows. The ranks must agree with each other.
    first, second = trained(2)[case]
    assert first.losses == second.losses
    assert first.norms == second.norms
    for name, value in first.parameters.items():
        assert torch.equal(second.parameters[name], value), name


def test_a_call_that_does_not_fit_the_order_is_refused_by_name() -> None:
    with pytest.raises(RanksError) as told:
        run_ranks(train, 2, Case("ordered", "again on one rank", "zero3"))
    assert "ConfigError: layers.0 is called in another order than before" in str(told.value)
    assert "parallel.fsdp.agree=true" in str(told.value)


def go_on(case: Case, folders: list[Path]) -> list[Result]:
    return [train(case, load=folder) for folder in folders]


@pytest.mark.parametrize("optimizer", either(["adamw"], ["sgd"]))
def test_what_was_never_used_is_saved_and_loaded(optimizer: str, tmp_path: Path) -> None:
    cases = {
        layout: Case("heads", "one", layout, 1, optimizer) for layout in ("single", "ddp", "zero3")
    }
    folders = {layout: tmp_path / layout for layout in cases}
    for layout, case in cases.items():
        folders[layout].mkdir()
        made = run_ranks(train, LAYOUTS[layout][0], case, folders[layout])
        if layout == "single":
            expected = made[0]
    rest = Result(expected.losses[SAVED:], expected.norms[SAVED:], expected.parameters)
    for layout, case in cases.items():
        by_rank = run_ranks(go_on, LAYOUTS[layout][0], case, list(folders.values()))
        for results in by_rank:
            for result in results:
                within(difference(result, rest), EXACT)
