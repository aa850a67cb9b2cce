"""Compressed gradients: what each kind sends and keeps, and how training goes on with it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn

from hpctrain.config.schema import CompressionConfig
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.parallel.reducing.gradient_compression import (
    GradientCompression,
    Int8,
    PowerSGD,
    TopK,
)
from tests.bounds import EXACT
from tests.parallel.parity import FP32, Cell, Training, build, checkpointer, either
from tests.ranks import run_ranks

STEPS = 20
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "powersgd": {"rank": 2},
    "topk": {"ratio": 0.05},
    "int8": {},
}


def cell(kind: str, *others: tuple[str, Any], steps: int = STEPS, ranks: int = 2) -> Cell:
    keys = {"kind": kind} | KINDS[kind]
    named = tuple((f"train.compression.{name}", value) for name, value in keys.items())
    if not any(key.startswith("precision.") for key, _ in others):
        named += FP32  # the format for which the bytes are stated
    # Small buckets, so that there are several. DDP replaces them after a process's first step.
    return Cell(
        "transformer", ranks, (*named, ("parallel.ddp.bucket_mb", 0.02), *others), steps=steps
    )


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


def reduced(
    made: Callable[..., GradientCompression], keys: dict[str, Any], dtype: torch.dtype
) -> dict[str, Reduced]:
    """Reduce random gradients twice with the hook that `made` constructs."""
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    named = {name: nn.Parameter(value) for name, value in zeros.items()}
    hook = made(CompressionConfig(**keys), named.items())
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


FIRST: dict[str, tuple[Callable[..., GradientCompression], dict[str, Any]]] = {
    "powersgd": (PowerSGD, {"rank": 2}),
    "powersgd, whole": (PowerSGD, {"rank": 30}),
    "topk": (TopK, {"ratio": 0.1}),
    "int8": (Int8, {}),
}


# The largest difference by rounding, of numbers near 1.
ROUNDING = {torch.float32: 1e-5, torch.float64: EXACT}
formats = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def _all_reduced(dtype: torch.dtype) -> dict[str, dict[str, Reduced]]:
    return {name: reduced(made, keys, dtype) for name, (made, keys) in FIRST.items()}


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
        if kind == "int8":
            assert not one.errors
            continue
        sent = sum((r.gradients[0] - r.errors[0] for r in (one, two)), torch.zeros(())) / 2
        if name == "matrix" or not kind.startswith("powersgd"):
            torch.testing.assert_close(sent, one.means[0], rtol=0, atol=ROUNDING[dtype])
        # Nothing is lost over both steps: what was sent and the errors add up to the gradients.
        gradients = sum((sum(r.gradients) for r in (one, two)), torch.zeros(())) / 2
        errors = (one.errors[1] + two.errors[1]) / 2
        torch.testing.assert_close(sum(one.means) + errors, gradients, rtol=0, atol=ROUNDING[dtype])


@formats
def test_topk_sends_the_largest(dtype: torch.dtype) -> None:
    for name, count in {"matrix": 72, "vector": 1}.items():
        ranks = [rank["topk"][name] for rank in by_rank(dtype)]
        for step in range(2):
            expected = torch.zeros((), dtype=dtype)
            for rank in ranks:
                total = rank.gradients[step] + (rank.errors[step - 1] if step else 0)
                chosen = total.abs() >= total.abs().sort().values[-count]
                assert torch.equal(rank.errors[step], torch.where(chosen, 0.0, total))
                expected = expected + torch.where(chosen, total, 0.0) / 2
            assert torch.equal(ranks[0].means[step], expected)


@formats
def test_int8_is_within_its_quantization_step(dtype: torch.dtype) -> None:
    for name in SHAPES:
        ranks = [rank["int8"][name] for rank in by_rank(dtype)]
        exact = (ranks[0].gradients[0] + ranks[1].gradients[0]) / 2
        largest = max(float(rank.gradients[0].abs().max()) for rank in ranks)
        difference = (ranks[0].means[0] - exact).abs().max()
        assert 0 < difference < largest / 127


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
    assert not by_rank(dtype)[0]["powersgd, whole"]["matrix"].errors[0].any()


def _resumed(folder: Path, kinds: list[str], ranks: int) -> dict[str, tuple[bool, float]]:
    """Return by kind whether a run that resumes twice equals an undisturbed one, and a count.

    The count is the number of tensors in the model's state (the errors of the compression).
    """
    result = {}
    for kind in kinds:
        one = cell(kind, ranks=ranks)

        def start(kind: str = kind, one: Cell = one) -> tuple[Training, Checkpointer]:
            training = build(one)
            saved = checkpointer(training, folder / kind)
            if (progress := saved.load_latest()) is not None:
                training.seen = training.model.step = progress["step"]
            return training, saved

        training, saved = start()
        if training.seen:  # the checkpoint is of another number of ranks
            result[kind] = (False, float(len(training.model.state_dict())))
            continue
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
        result[kind] = (same, float(len(states[0])))
    return result


@pytest.mark.parametrize("kinds", either([["powersgd"]], [["topk", "int8"]]), ids=", ".join)
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path, kinds: list[str]) -> None:
    for result in run_ranks(_resumed, 2, tmp_path, kinds, 2):
        assert {kind: same for kind, (same, _) in result.items()} == dict.fromkeys(kinds, True)
        assert {kind for kind, (_, state) in result.items() if state} == {*kinds} - {"int8"}
    (alone,) = run_ranks(_resumed, 1, tmp_path, kinds, 1)
    assert alone == dict.fromkeys(kinds, (False, 0.0))
