"""Local SGD: what the replicas have in common, and that every=1 is plain DDP."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.distributed.ranks import RankInfo
from tests.parallel.parity import Cell, Training, build, reference, whole
from tests.ranks import run_ranks

STEPS = 20


def cell(*others: tuple[str, Any], ranks: int = 2, model: str = "conv", **keys: Any) -> Cell:
    named = tuple((f"train.local_sgd.{name}", value) for name, value in keys.items())
    return Cell(model, ranks, (*named, *others), steps=STEPS)


PLAIN = (("train.clip_norm", None),)
CELLS = {
    "ddp": cell(*PLAIN),
    "every step": cell(*PLAIN, every=1),
    "every step, accumulate": cell(*PLAIN, ("train.accumulate", 2), every=1),
    "later": cell(*PLAIN, every=3, start_step=STEPS),
    "clipped": cell(every=4),
    "diloco": cell(*PLAIN, every=4, outer_lr=0.7, outer_momentum=0.9),
    "post-local": cell(*PLAIN, every=4, start_step=6),
}


class Trained(NamedTuple):
    """A training: its losses, and the parameters before and after `finish`."""

    losses: list[float]
    replica: dict[str, torch.Tensor]
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
        training.run(one, STEPS - 1)
        replica = {key: value.clone() for key, value in whole(training.model).items()}
        training.run(one, 1)
        training.model.finish()
        result[name] = Trained(training.losses, replica, whole(training.model))
    return result


@functools.cache
def trained() -> list[dict[str, Trained]]:
    return run_ranks(_trained, 2, CELLS, timeout=120)


@pytest.mark.parametrize("name", ["every step", "every step, accumulate", "later"])
def test_an_average_of_every_step_is_ddp(name: str) -> None:
    """Also where ranks have different counts, as the batches of the parity tests have."""
    for rank in trained():
        for key, value in rank["ddp"].parameters.items():
            torch.testing.assert_close(rank[name].parameters[key], value, rtol=0, atol=1e-6)
        assert rank[name].losses == pytest.approx(rank["ddp"].losses, rel=1e-5)


@pytest.mark.parametrize("name", ["clipped", "diloco", "post-local"])
def test_replicas_differ_until_they_are_averaged(name: str) -> None:
    one, two = (rank[name] for rank in trained())
    assert not all(torch.equal(one.replica[key], two.replica[key]) for key in one.replica)
    assert all(torch.equal(one.parameters[key], two.parameters[key]) for key in one.parameters)
    losses, plain = one.losses, trained()[0]["ddp"].losses
    assert sum(losses[-5:]) < sum(losses[:5])
    worst = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
    print(f"{name}: {worst:.1e}, last loss {losses[-1]:.4f}, {plain[-1]:.4f}")
    assert worst < 0.1


def _outer() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters before two averages, and after them."""
    one = cell(*PLAIN, every=3, start_step=1, outer_lr=0.7, outer_momentum=0.9)
    training = _without_momentum(one)
    seen = []

    def now() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in training.model.parameters])

    training.run(one, 1)
    seen.append((now(), now()))
    average = training.model._average  # type: ignore[attr-defined]

    def watched() -> None:
        before = now()
        average()
        seen.append((before, now()))

    training.model._average = watched  # type: ignore[attr-defined]
    training.run(one, 7)
    training.model.finish()
    return seen


def test_the_outer_step_is_that_of_diloco() -> None:
    one, two = run_ranks(_outer, 2)
    assert len(one) == 4  # the start, after steps 4 and 7, and the end
    optimized = torch.nn.Parameter(one[0][1].clone())
    outer = torch.optim.SGD([optimized], lr=0.7, momentum=0.9, nesterov=True)
    for (first, after), (second, same) in zip(one[1:], two[1:], strict=True):
        assert torch.equal(after, same)
        optimized.grad = optimized.detach() - (first + second) / 2
        outer.step()
        torch.testing.assert_close(after, optimized.detach(), rtol=0, atol=1e-6)


def _resumed(folder: Path, ranks: int) -> tuple[bool, bool]:
    """Whether a resumed run equals an undisturbed one, and all ranks have rank 0's parameters."""
    rank = distributed.get_rank()
    place = RankInfo("test", rank, rank, 0, ranks, ranks, 1, "localhost", 1)
    one = cell(every=4, start_step=1, outer_lr=0.7, outer_momentum=0.9, ranks=ranks)

    def start() -> tuple[Training, Checkpointer]:
        training = build(one)
        saved = Checkpointer(folder, 9, place, training.model, training.step.optimizer)
        if (progress := saved.load_latest()) is not None:
            training.seen = training.model.step = progress["step"]
        return training, saved

    training, saved = start()
    if training.seen:
        own = torch.cat([p.detach().flatten() for p in training.model.parameters])
        expected = torch.load(folder / "rank0.pt")
        return False, torch.equal(own, expected)
    for stop in (1, 3, 7, 9, 11):  # before the first one, between and at averages
        training.run(one, stop - training.seen)
        saved.save(stop, {"step": stop})
        if stop < 11:
            training, saved = start()
    if rank == 0:
        own = torch.cat([p.detach().flatten() for p in training.model.parameters])
        torch.save(own, folder / "rank0.pt")
    undisturbed = build(one)
    undisturbed.run(one, 11)
    pairs = zip(training.model.parameters, undisturbed.model.parameters, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    states = training.model.state_dict(), undisturbed.model.state_dict()
    same &= all(torch.equal(states[0][key], value) for key, value in states[1].items())
    return same, bool(states[0])


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    assert run_ranks(_resumed, 2, tmp_path, 2) == [(True, True)] * 2
    # Another number of ranks starts from the replica of rank 0.
    assert run_ranks(_resumed, 1, tmp_path, 1) == [(False, True)]


def test_one_rank_has_nothing_to_average() -> None:
    (alone,) = run_ranks(_trained, 1, {"alone": cell(every=4, ranks=1)})
    expected = reference("conv", steps=STEPS)
    assert alone["alone"].losses[0] == pytest.approx(expected.losses[0])
