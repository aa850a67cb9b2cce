"""Local SGD: averages make the replicas equal, every=1 equals DDP, and runs can be resumed."""

import functools
import io
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed

from hpctrain.data.shards.types import Batch
from hpctrain.engine.loop import Trainer
from hpctrain.engine.parts.improvement import Patience
from tests.bounds import EXACT
from tests.parallel.parity import Cell, Training, batch, build, whole
from tests.ranks import run_ranks
from tests.steps import Every, stop_of, trainer_of

STEPS = 5


def cell(*others: tuple[str, Any], ranks: int = 2, **keys: Any) -> Cell:
    named = tuple((f"train.local_sgd.{name}", value) for name, value in keys.items())
    return Cell("transformer", ranks, (*named, *others), steps=STEPS)


PLAIN = (("train.clip_norm", None),)
CELLS = {
    "ddp": cell(*PLAIN),
    "every step": cell(*PLAIN, every=1),
    "every step, accumulate": cell(*PLAIN, ("train.accumulate", 2), every=1),
}


class Trained(NamedTuple):
    """The losses of a training, and its parameters at the end."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def _without_momentum(one: Cell) -> Training:
    training = build(one)
    for group in training.step.optimizer.param_groups:
        group["momentum"] = 0.0
    return training


def _trained(cells: dict[str, Cell]) -> dict[str, Trained]:
    result = {}
    for name, one in cells.items():
        training = _without_momentum(one)
        training.run(one, STEPS)
        training.model.finish()
        result[name] = Trained(training.losses, whole(training.model))
    return result


@functools.cache
def trained() -> list[dict[str, Trained]]:
    return run_ranks(_trained, 2, CELLS, timeout=240)


@pytest.mark.parametrize("name", ["every step", "every step, accumulate"])
def test_an_average_of_every_step_is_ddp(name: str) -> None:
    """This holds also where ranks have different counts, as in the batches of the parity tests."""
    for rank in trained():
        for key, value in rank["ddp"].parameters.items():
            torch.testing.assert_close(rank[name].parameters[key], value, rtol=0, atol=EXACT)
        assert rank[name].losses == pytest.approx(rank["ddp"].losses, rel=EXACT)


def _outer() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters at the start, and before and after each average."""
    one = cell(*PLAIN, every=3, outer_lr=0.7, outer_momentum=0.9)
    training = _without_momentum(one)
    seen = []

    def now() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in training.model.parameters])

    seen.append((now(), now()))
    average = training.model._average  # type: ignore[attr-defined]

    def watched() -> None:
        before = now()
        average()
        seen.append((before, now()))

    training.model._average = watched  # type: ignore[attr-defined]
    training.run(one, 8)
    training.model.finish()
    return seen


def test_the_outer_step_is_that_of_diloco() -> None:
    one, two = run_ranks(_outer, 2)
    assert len(one) == 4  # the start, after steps 3 and 6, and the end
    optimized = torch.nn.Parameter(one[0][1].clone())
    outer = torch.optim.SGD([optimized], lr=0.7, momentum=0.9, nesterov=True)
    for (first, after), (second, same) in zip(one[1:], two[1:], strict=True):
        assert torch.equal(after, same)
        optimized.grad = optimized.detach() - (first + second) / 2
        outer.step()
        torch.testing.assert_close(after, optimized.detach(), rtol=0, atol=EXACT)


class Batches:
    """A feed for a `Trainer` that gives the batches of the parity tests without an end."""

    wait_s, epoch, last = 0.0, 0.0, None

    def __init__(self, training: Training) -> None:
        self.training = training

    def samples(self, step: None) -> list[tuple[str, int]]:
        return []

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.training.seen += 1
            yield self.training._share(batch("conv", self.training.seen))

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.training.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.training.seen = state["consumed"]

    def close(self) -> None:
        pass


class Evaluation(Batches):
    """Five batches of an evaluation; in the second one a rank may get a stop request."""

    def __init__(self, training: Training, stops: bool) -> None:
        super().__init__(training)
        self.stops, self.made = stops, 0

    def __iter__(self) -> Iterator[Batch]:
        self.made += 1
        for number in range(5):
            if self.stops and self.made == 2 and number == 1 and distributed.get_rank() == 1:
                stop_of(self.training.step).asked = "SIGTERM"
            yield self.training._share(batch("conv", 90 + number))

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def _trainer(folder: Path, evaluates: bool = False, stops: bool = False) -> Trainer:
    """Return a training of ten steps, with averages after steps 3, 6, 9 and 10.

    With `evaluates`, the evaluation after step 8 ends the run.
    """
    keys = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
    named = tuple((f"train.local_sgd.{name}", value) for name, value in keys.items())
    training = build(Cell("conv, batch norm", distributed.get_world_size(), named))
    return trainer_of(
        *(training.step, folder, 10, Every(log=5, checkpoint=2)),
        evaluate_every=4 if evaluates else 100,
        loader=Batches(training),
        evaluations={"val": Evaluation(training, stops)} if evaluates else {},
        parts=[Patience("val/loss", 1e9, 1)] if evaluates else [],
    )


def _state(trainer: Trainer) -> list[torch.Tensor]:
    """Return the tensors of the trainer on this rank: parameters, statistics and momenta."""
    model, optimizer = trainer.train_step.model, trainer.train_step.optimizer
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    both = [*model.module.state_dict().values(), *model.state_dict().values(), *momenta]
    return [value.clone() for value in both]


def _resumed(folder: Path) -> list[bool]:
    """Return whether the run equals the undisturbed one, for each step from which it resumes."""
    undisturbed = _trainer(folder)
    undisturbed.fit()
    same = []
    for step in (8, 6):  # step 8 is between two averages, and step 6 after one
        if distributed.get_rank() == 0:
            for path in folder.glob("step-*"):
                if int(path.name[5:]) > step:
                    shutil.rmtree(path)
        distributed.barrier()
        resumed = _trainer(folder)
        assert resumed.fit().first_step == step
        pairs = zip(_state(resumed), _state(undisturbed), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
    return same


def _stopped_at_the_end(folder: Path) -> list[bool]:
    """Return what equals the undisturbed run: the resumed one, and its last checkpoint."""
    undisturbed = _trainer(folder / "whole", evaluates=True)
    outcome = undisturbed.fit()
    assert (outcome.finished, outcome.step) == (True, 8)
    stopped = _trainer(folder / "stopped", evaluates=True, stops=True).fit()
    assert (stopped.finished, stopped.step) == (False, 8)
    resumed = _trainer(folder / "stopped", evaluates=True)
    assert resumed.fit().reason == outcome.reason != ""
    saved = _trainer(folder / "stopped", evaluates=True)
    saved.session.saving.checkpointer.load_latest()
    expected = _state(undisturbed)
    return [
        all(torch.equal(a, b) for a, b in zip(_state(each), expected, strict=True))
        for each in (resumed, saved)
    ]


def test_a_run_that_is_stopped_in_its_last_evaluation_is_averaged(tmp_path: Path) -> None:
    """Early stopping ends the run between two averages, so the last one is made then."""
    assert run_ranks(_stopped_at_the_end, 2, tmp_path) == [[True, True]] * 2


def _loaded(folder: Path) -> tuple[bool, str]:
    """Return whether one rank has the parameters of rank 0's replica, and what was logged."""
    handler = logging.StreamHandler(said := io.StringIO())
    logging.getLogger("hpctrain").addHandler(handler)
    try:
        trainer = _trainer(folder)
        trainer.session.saving.checkpointer.load_latest()
        model = trainer.train_step.model
        saved = {key: torch.empty_like(value) for key, value in model.module.state_dict().items()}
        dcp.load({"replica.0.model": saved}, checkpoint_id=folder / "step-00000008")
        pairs = ((value, saved[key]) for key, value in model.module.state_dict().items())
        return all(torch.equal(a, b) for a, b in pairs) and not model.state_dict(), said.getvalue()
    finally:
        logging.getLogger("hpctrain").removeHandler(handler)


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    assert run_ranks(_resumed, 2, tmp_path) == [[True, True]] * 2
    for path in tmp_path.glob("step-*"):
        if path.name > "step-00000008":
            shutil.rmtree(path)
    ((same, said),) = run_ranks(_loaded, 1, tmp_path)
    assert same
    assert "saved by 2 ranks, and there are 1 now" in said
