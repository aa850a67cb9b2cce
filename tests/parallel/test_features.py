"""What a training has beside its steps gives the numbers of one process in every layout.

One training has all of it: groups of parameters, layer-wise decay, frozen parameters, and a moving
average, which evaluates the model after each step.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.engine.parallel.wrappers import fsdp
from tests.bounds import EXACT, within
from tests.parallel.parity import (
    BEFORE,
    FP32,
    STEPS,
    Cell,
    Cells,
    Result,
    Values,
    build,
    difference,
    either,
    halves,
    reference,
    results,
)
from tests.ranks import run_ranks

Keys = dict[str, Any]
SHARD: Keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
PP: Keys = {"parallel.pp": 2, "parallel.dp_replicate": 1, "train.accumulate": 4}
LAYOUTS: dict[str, tuple[str, int, Keys]] = {
    "ddp": ("untied", 2, {"train.accumulate": 2}),
    "zero1": ("untied", 2, SHARD | {"parallel.zero": 1, "train.accumulate": 2}),
    "zero2": ("untied", 2, SHARD | {"parallel.zero": 2, "train.accumulate": 2}),
    "zero3": ("untied", 2, SHARD),
    "zero3, tied": ("transformer", 2, SHARD),
    "offload": ("untied", 2, SHARD | {"parallel.fsdp.offload": True}),
    "local sgd": ("untied", 2, {"train.local_sgd.every": 1, "train.clip_norm": None}),
    "tp": ("untied", 2, {"parallel.tp": 2}),
    "tp, tied": ("transformer", 2, {"parallel.tp": 2}),
    "pp": ("untied", 2, PP),
    "cp": ("untied", 2, {"parallel.cp": 2}),
    "ep": ("moe", 2, {"parallel.ep": 2}),
    "hsdp": ("untied", 4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "tp, zero3": ("untied", 4, {"parallel.tp": 2} | SHARD),
    "pp, tp": ("untied", 4, PP | {"parallel.tp": 2}),
}
FAST = ("zero1", "pp")


def cell(name: str) -> Cell:
    model, ranks, keys = LAYOUTS[name]
    return Cell(model, ranks, tuple(keys.items()), "features")


SLOW = [name for name in LAYOUTS if name not in FAST]
CELLS = Cells(map(cell, FAST), map(cell, SLOW))


@pytest.mark.parametrize("name", either(FAST, SLOW))
def test_equal_to_one_process(name: str) -> None:
    made = cell(name)
    expected = reference(made.model, "features")
    if name == "local sgd":  # whose reference does not clip, and whose norms are those of replicas
        unclipped = Cell(made.model, 1, made.keys[-1:], "features")
        (expected,) = results((unclipped,))[unclipped]
    for result in CELLS[made]:
        losses, norms, parameters = difference(result, expected)
        norms = 0.0 if name == "local sgd" else norms
        assert len(result.losses) == 2 * STEPS, "each step, and an evaluation after it"
        within([losses, norms, parameters], EXACT)


# Stages of 2, 2 and 1 steps; micro-batches of 2 rows (1 on hsdp), so each stage has others.
RAMP = ("train.batch_size_ramp", Values([{"global_batch_size": n, "steps": 2} for n in (8, 12)]))


@functools.cache
def ramped(name: str) -> tuple[Cell, list[Result]]:
    model, ranks, keys = LAYOUTS[name]
    rows = "1" if name == "hsdp" else "2"  # 4 ranks divide the batches
    sizes = {"train.accumulate": 1, "train.micro_batch_size": rows}
    made = Cell(model, ranks, (*(keys | sizes).items(), RAMP), "features")
    return made, results((made,))[made]


@pytest.mark.parametrize("name", either(["pp"], [name for name in LAYOUTS if name != "pp"]))
def test_a_ramp_of_the_batch_size_is_equal_to_one_process(name: str) -> None:
    made, by_rank = ramped(name)
    keys = (RAMP, ("train.clip_norm", None)) if name == "local sgd" else (RAMP,)
    expected = reference(made.model, "features", keys=keys)
    plain = reference(made.model, "features")
    assert expected.losses[0] != plain.losses[0], "the first batch is smaller"
    for result in by_rank:
        losses, norms, parameters = difference(result, expected)
        norms = 0.0 if name == "local sgd" else norms
        within([losses, norms, parameters], EXACT)


# Batches of 6, 12 and 18 rows, which weights of 2 and 1 divide; other ranks may have other rows.
SIZES = (
    ("train.batch_size_ramp", Values([{"global_batch_size": n, "steps": 2} for n in (6, 12)])),
    ("train.global_batch_size", 18),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, {"parallel.weights": (2, 1)}),
        (2, {"parallel.weights": (2, 1), "train.accumulate": 2}),
        (2, {"parallel.weights": (2, 1), "train.micro_batch_size": "1"}),
        (1, {"train.compile": "model"}),
        (2, {"train.compile": "blocks", "train.micro_batch_size": "3"}),
    ],
    ids=str,
)
def test_a_ramp_with_weights_and_with_the_compiler(ranks: int, keys: Keys) -> None:
    made = Cell("transformer", ranks, (*keys.items(), *SIZES))
    expected = reference("transformer", keys=SIZES)
    for result in results((made,))[made]:
        within(difference(result, expected), EXACT)


MORE = [
    ("zero1", "pp"),
    *(("hsdp", "ddp"), ("ddp", "tp"), ("tp", "zero3"), ("zero3", "cp"), ("cp", "tp, zero3")),
    *(("pp", "local sgd"), ("pp, tp", "offload"), ("offload", "hsdp"), ("tp, tied", "tp, tied")),
    *(("ep", "ep"), ("local sgd", "local sgd"), ("zero3", "zero2"), ("zero2", "pp, tp")),
]


@pytest.mark.parametrize(("first", "then"), either([("zero1", "zero1")], MORE, several=True))
def test_a_checkpoint_has_all_of_it(first: str, then: str, tmp_path: Path) -> None:
    """In the same layout a resumed training has the same bits, in another one the same numbers."""
    one, two = cell(first), cell(then)
    whole = run_ranks(halves, one.ranks, one, tmp_path, True, timeout=480)
    resumed = run_ranks(halves, two.ranks, two, tmp_path, False, timeout=480)
    rest = slice(BEFORE, None)
    for mine, theirs in zip(resumed, whole, strict=False):
        assert mine.parameters.keys() == theirs.parameters.keys()
        if first == then:
            assert mine.losses[: STEPS - BEFORE] == theirs.losses[BEFORE:STEPS]
            equal = (torch.equal(p, theirs.parameters[n]) for n, p in mine.parameters.items())
            assert all(equal)
        elif "local sgd" not in (first, then):  # which do not clip
            both = Result(theirs.losses[STEPS + BEFORE :], theirs.norms[rest], theirs.parameters)
            ours = Result(mine.losses[STEPS - BEFORE :], mine.norms, mine.parameters)
            within(difference(ours, both), EXACT)


def offloaded() -> list[list[float]]:
    """Return the losses of two steps on one rank, without page-locked memory and with it."""
    cell = Cell("conv", 1, (*(SHARD | {"parallel.fsdp.offload": True}).items(), *FP32))
    plain, real, policy = build(cell), torch.Tensor.clone, fsdp.CPUOffloadPolicy
    plain.run(cell, 2)
    locked: dict[int, torch.Tensor] = {}

    def lock(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        copy = real(tensor)
        locked[copy.untyped_storage().data_ptr()] = copy
        return copy

    def is_locked(tensor: torch.Tensor, *_: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in locked

    with pytest.MonkeyPatch.context() as patch:  # a copy stands for memory that CUDA has locked
        patch.setattr(fsdp, "CPUOffloadPolicy", lambda **_: policy(pin_memory=True))
        patch.setattr(torch.Tensor, "pin_memory", lock)
        patch.setattr(torch.Tensor, "is_pinned", is_locked)
        training = build(cell)
        training.run(cell, 2)
    assert len(locked) == len(training.model.parameters) > 0
    assert all(is_locked(parameter.to_local()) for parameter in training.model.parameters)
    return [plain.losses, training.losses]


def test_offload_keeps_the_page_locked_memory_of_the_parameters() -> None:
    """Else torch locks it once more at the first pass, and the optimizer has other memory."""
    ((plain, on_gpu),) = run_ranks(offloaded, 1)
    assert plain == on_gpu
