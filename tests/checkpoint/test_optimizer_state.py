"""What an optimizer keeps is saved and loaded bit by bit, without a step of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.errors import ConfigError
from hpctrain.results.trained_model import load_weights
from tests.parallel.parity import Cell, build, whole
from tests.parallel.parity import checkpointer as checkpointer_of
from tests.ranks import run_ranks
from tests.steps import ALONE, alone, batch, make, weights
from tests.training.optimizers import Counted, Early, Lion, Nested, Prodigy, RowWise, ScheduleFree

Made = Callable[[Any], torch.optim.Optimizer]
OWN: dict[str, Made] = {
    "schedule-free": lambda p: ScheduleFree(p, lr=1e-2),
    "state in __init__": lambda p: Early(p, lr=1e-2),
    "lists and dicts": lambda p: Nested(p, lr=1e-2),
    "smaller states": lambda p: RowWise(p, lr=1e-2),
    "numbers of groups": lambda p: Prodigy(p, lr=1.0),
    "one tensor": lambda p: Lion(p, lr=1e-2),
    "no state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def with_optimizer(made: Made, folder: Path) -> tuple[TrainStep, Checkpointer]:
    step = make()
    step.optimizer = made(step.model.parameters)
    return step, Checkpointer(folder, 2, ALONE, step.model, step.optimizer)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", OWN)
def test_resumed_twice_is_the_undisturbed_training(name: str, tmp_path: Path) -> None:
    ends = []
    for resumed in (True, False):
        step, saved = with_optimizer(OWN[name], tmp_path)
        saved.modes.train()
        for number in range(1, 7):
            if resumed and number in (3, 5):
                saved.save(number, {})
                step, saved = with_optimizer(OWN[name], tmp_path)
                assert saved.load_latest() == {}
            step(batch(16, number), 1e-2)
        ends.append((weights(step), step.optimizer.state_dict()))
    (ours, state), (theirs, expected) = ends
    assert torch.equal(ours, theirs)
    assert repr(state) == repr(expected)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("before", "after"), [(None, True), (True, None), (False, True)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_run_that_began_without_fused_kernels_goes_on_without_them(
    kind: Any, before: bool | None, after: bool | None, tmp_path: Path
) -> None:
    """It has the same bits. One that began with them goes on where there are none."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    ends = []
    for resumed in (True, False):
        step, saved = with_optimizer(lambda p: kind(p, lr=1e-2, fused=before, **options), tmp_path)
        for number in range(1, 5):
            if resumed and number == 3:
                saved.save(number, {})
                step, saved = with_optimizer(
                    lambda p: kind(p, lr=1e-2, fused=after, **options), tmp_path
                )
                assert saved.load_latest() == {}
                assert step.optimizer.param_groups[0]["fused"] is (before and after)
            step(batch(16, number), 1e-2)
        ends.append(weights(step))
    assert torch.equal(*ends) if not before else torch.allclose(*ends)


@pytest.mark.parametrize(
    "name",
    [
        "Nested",
        "Fused",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("ScheduleFree", "Early")),
    ],
)
def test_parts_of_a_state_are_resumed_on_two_ranks(name: str, tmp_path: Path) -> None:
    assert run_ranks(resumed_parts, 2, name, tmp_path) == [0.0, 0.0]


def resumed_parts(name: str, folder: Path) -> float:
    """Return how much a resumed training on divided parameters differs."""
    keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": 1}
    cell = Cell("conv", 2, tuple(keys.items()), optimizer=f"tests.training.optimizers.{name}")
    ends = []
    for resumed in (False, True):
        training = build(cell)
        saved = checkpointer_of(training, folder)
        if resumed:
            assert saved.load_latest() == {}
            training.seen = 2
        else:
            saved.modes.train()
            training.run(cell, 2)
            saved.save(2, {})
        training.run(cell, 2)
        ends.append(whole(training.model))
    one, two = ends
    return max(float((one[key] - two[key]).abs().max()) for key in one)


@pytest.mark.usefixtures("group_of_one")
def test_neither_a_save_nor_a_load_makes_a_step(tmp_path: Path) -> None:
    step, saved = with_optimizer(lambda p: Counted(p, lr=1e-2), tmp_path)
    before, calls = weights(step).clone(), Counted.calls
    assert saved.save(1, {})
    assert saved.load_latest() == {}
    step(batch(8), 1e-2)
    assert saved.save(2, {})  # this optimizer has no state after steps either
    again, loaded = with_optimizer(lambda p: Counted(p, lr=1e-2), tmp_path)
    assert loaded.load_latest() == {}
    assert Counted.calls == calls + 1
    assert again.optimizer.param_groups[0]["count"] == 1
    assert all(p.grad is None for p in again.model.parameters)
    assert not torch.equal(before, weights(step))


@pytest.mark.usefixtures("group_of_one")
def test_a_checkpoint_has_the_weights_for_evaluations(tmp_path: Path) -> None:
    step, saved = with_optimizer(OWN["schedule-free"], tmp_path)
    saved.modes.train()
    for number in range(3):
        step(batch(16, number), 1e-2)
    trained = weights(step)
    with saved.modes.evaluating():
        evaluated = weights(step)
    assert torch.equal(weights(step), trained), "an evaluation leaves the training as it was"
    saved.save(3, {})
    assert torch.equal(weights(step), trained)
    assert step.optimizer.param_groups[0]["train_mode"]
    load_weights(step.model.module, tmp_path / "step-00000003")
    assert torch.equal(weights(step), evaluated)
    assert not torch.equal(evaluated, trained)


@pytest.mark.usefixtures("group_of_one")
def test_dtypes_stay_where_parameters_are_narrow(tmp_path: Path) -> None:
    """torch would give a state in fp32, such as exact weights, the format of the parameters."""
    ends = []
    for _ in range(2):
        model = alone(nn.Linear(4, 3).to(torch.bfloat16))
        optimizer = Nested(model.parameters, lr=1e-2)
        saved = Checkpointer(tmp_path, 2, ALONE, model, optimizer)
        if saved.load_latest() is None:
            for parameter in model.parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            saved.save(1, {})
        ends.append([optimizer.state[p] for p in model.parameters])
    for ours, theirs in zip(*ends, strict=True):
        assert ours["exact"].dtype == theirs["exact"].dtype == torch.float64
        assert torch.equal(ours["exact"], theirs["exact"])
        assert theirs["count"].dtype == torch.int64
        assert theirs["none"] is None


@pytest.mark.usefixtures("group_of_one")
def test_what_nobody_asks_for_is_named(tmp_path: Path) -> None:
    def saved(model: nn.Module, made: Made) -> Checkpointer:
        parallel = alone(model)
        return Checkpointer(tmp_path, 2, ALONE, parallel, made(parallel.parameters))

    first = saved(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.optim.AdamW)
    for parameter in first.models[""].parameters:
        parameter.grad = torch.ones_like(parameter)
    first._optimizers[""]._optimizer.step()
    first.save(1, {})
    with pytest.raises(ConfigError, match=r"does not fit the model: 1\.bias is not in the model"):
        saved(nn.Sequential(nn.Linear(2, 2)), torch.optim.AdamW).load_latest()
    with pytest.raises(ConfigError, match=r"state of torch\.optim\.adamw\.AdamW, and this run has"):
        saved(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.optim.SGD).load_latest()
