"""Compressed gradients: what is sent and kept, and how training goes on with it."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn

from hpctrain.addons.gradient_compression import PowerSGD
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from tests.bounds import EXACT
from tests.parallel.parity import FP32, Cell, Training, build, checkpointer
from tests.ranks import run_ranks

KEYS: dict[str, Any] = {"train.compression.kind": "powersgd", "train.compression.rank": 2}


def cell(ranks: int) -> Cell:
    # Small buckets, so that there are several. DDP replaces them after a process's first step.
    return Cell("transformer", ranks, (*KEYS.items(), *FP32, ("parallel.ddp.bucket_mb", 0.02)))


class Bucket:
    """The part of torch's GradBucket that a hook uses."""

    def __init__(self, parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._buffer = torch.cat([gradient.flatten() for gradient in gradients])

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer


class Reduced(NamedTuple):
    """The gradients of one parameter in two reductions, their means, and the errors after them."""

    gradients: list[torch.Tensor]
    means: list[torch.Tensor]
    errors: list[torch.Tensor]


SHAPES = {"matrix": (24, 30), "vector": (11,)}


def reduced(rank: int, dtype: torch.dtype) -> dict[str, Reduced]:
    """Reduce random gradients twice with matrices of a rank."""
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    named = {name: nn.Parameter(value) for name, value in zeros.items()}
    hook = PowerSGD(rank, named.items())
    draw = torch.Generator().manual_seed(distributed.get_rank())
    result = {name: Reduced([], [], []) for name in named}
    for _ in range(2):
        gradients = {n: torch.randn(s, generator=draw).to(dtype) for n, s in SHAPES.items()}
        bucket = Bucket(list(named.values()), list(gradients.values()))
        mean = hook.reduce(bucket).wait()  # type: ignore[arg-type]
        parts = mean.split([parameter.numel() for parameter in named.values()])
        for (name, gradient), part in zip(gradients.items(), parts, strict=True):
            result[name].gradients.append(gradient.flatten())
            result[name].means.append(part.clone())
            if name in hook.errors:
                result[name].errors.append(hook.errors[name].clone())
    return result


FIRST = {"powersgd": 2, "whole": 30}


# The largest difference by rounding, of numbers near 1.
ROUNDING = {torch.float32: 1e-5, torch.float64: EXACT}
formats = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def _all_reduced(dtype: torch.dtype) -> dict[str, dict[str, Reduced]]:
    return {name: reduced(rank, dtype) for name, rank in FIRST.items()}


@functools.cache
def by_rank(dtype: torch.dtype) -> list[dict[str, dict[str, Reduced]]]:
    return run_ranks(_all_reduced, 2, dtype)


@formats
@pytest.mark.parametrize("kind", FIRST)
def test_all_ranks_get_the_same_mean_and_the_errors_hold_the_rest(
    kind: str, dtype: torch.dtype
) -> None:
    for name in SHAPES:
        one, two = (rank[kind][name] for rank in by_rank(dtype))
        assert torch.equal(torch.stack(one.means), torch.stack(two.means))
        sent = sum((r.gradients[0] - r.errors[0] for r in (one, two)), torch.zeros(())) / 2
        if name == "matrix":
            torch.testing.assert_close(sent, one.means[0], rtol=0, atol=ROUNDING[dtype])
        # Nothing is lost over both steps: what was sent and the errors add up to the gradients.
        gradients = sum((sum(r.gradients) for r in (one, two)), torch.zeros(())) / 2
        errors = (one.errors[1] + two.errors[1]) / 2
        torch.testing.assert_close(sum(one.means) + errors, gradients, rtol=0, atol=ROUNDING[dtype])


@formats
def test_powersgd_sends_a_matrix_of_its_rank(dtype: torch.dtype) -> None:
    one, two = (rank["powersgd"] for rank in by_rank(dtype))
    mean = one["matrix"].means[0].view(SHAPES["matrix"])
    assert torch.linalg.matrix_rank(mean, rtol=1e-4) == 2
    # It is the projection of the mean gradient on its columns.
    exact = ((one["matrix"].gradients[0] + two["matrix"].gradients[0]) / 2).view_as(mean)
    columns = torch.linalg.svd(mean).U[:, :2]
    torch.testing.assert_close(mean, columns @ columns.T @ exact, rtol=0, atol=ROUNDING[dtype])
    vectors = (one["vector"].gradients[0] + two["vector"].gradients[0]) / 2
    torch.testing.assert_close(one["vector"].means[0], vectors)
    # Two matrices of rank 30 would be larger than the matrix itself.
    assert not by_rank(dtype)[0]["whole"]["matrix"].errors[0].any()


def _resumed(folder: Path, ranks: int) -> tuple[bool, bool]:
    """Return whether a run that resumes twice equals an undisturbed one, and has a state."""
    one = cell(ranks)

    def start() -> tuple[Training, Checkpointer]:
        training = build(one)
        saved = checkpointer(training, folder)
        if (progress := saved.load_latest()) is not None:
            training.seen = training.model.step = progress["step"]
        return training, saved

    training, saved = start()
    if training.seen:  # the checkpoint is of another number of ranks
        return False, bool(training.model.state_dict())
    for stop in (2, 4, 6):
        training.run(one, stop - training.seen)
        saved.save(stop, {"step": stop})
        if stop < 6:
            training, saved = start()
    undisturbed = build(one)
    undisturbed.run(one, 6)
    pairs = zip(training.model.parameters, undisturbed.model.parameters, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    states = training.model.state_dict(), undisturbed.model.state_dict()
    same &= states[0].keys() == states[1].keys()
    same &= all(torch.equal(states[0][key], value) for key, value in states[1].items())
    return same, bool(states[0])


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    assert run_ranks(_resumed, 2, tmp_path, 2) == [(True, True)] * 2
    assert run_ranks(_resumed, 1, tmp_path, 1) == [(False, False)]
