"""A model of which a part is frozen trains as on one process, in every layout.

Fine-tuning is this: frozen first layers, frozen layers in the middle, an encoder under `no_grad`,
adapters. The inputs of some blocks then need no gradient, and the last block may be the head, whose
outputs are those of the model. Every training here clips, and keeps a moving average, which
evaluates the model after each step.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.bounds import EXACT, within
from tests.parallel.parity import (
    BEFORE,
    STEPS,
    Cell,
    Cells,
    Result,
    Values,
    difference,
    either,
    halves,
    reference,
    train,
)
from tests.ranks import RanksError, run_ranks

Keys = dict[str, Any]
FROZEN: dict[str, Keys] = {
    "prefix": {"optimizer.groups": [{"match": ["embed.*", "layers.[012].*"], "freeze": True}]},
    "middle": {"optimizer.groups": [{"match": "layers.[12].*", "freeze": True}]},
    "no_grad": {},
    "lora": {"train.lora.match": ("*.linear",), "train.lora.rank": 2},
}
HEADS = ("inside", "outside")
SHARD: Keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
LAYOUTS: dict[str, tuple[int, Keys]] = {
    "zero1": (2, SHARD | {"parallel.zero": 1}),
    "zero2": (2, SHARD | {"parallel.zero": 2}),
    "zero3": (2, SHARD),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2, "parallel.dp_replicate": 1}),
    "hsdp": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
}
PP: Keys = {"parallel.pp": 2, "parallel.dp_replicate": 1}
MORE: dict[str, tuple[int, Keys]] = {
    "zbv": (2, PP | {"parallel.pipeline.schedule": "zbv"}),
    "interleaved_zb": (2, PP | {"parallel.pipeline.schedule": "interleaved_zb"}),
    "agree": (2, SHARD | {"parallel.fsdp.agree": True}),
    "checkpointing": (2, SHARD | {"train.activation_checkpointing": "full"}),
    "ddp": (2, {"parallel.ddp.find_unused_parameters": True}),
    "reduced last": (2, SHARD | {"parallel.sync": "last"}),
    "pp, zero3": (4, PP | {"parallel.dp_shard": 2}),
    "tp, zero3": (4, SHARD | {"parallel.tp": 2, "parallel.dp_shard": 2}),
}


def cell(frozen: str, head: str, ranks: int = 1, keys: Keys | None = None) -> Cell:
    model = f"tower, head {head}{', no_grad' if frozen == 'no_grad' else ''}"
    given = FROZEN[frozen] | (keys or {})
    hashable = {k: Values(v) if isinstance(v, list) else v for k, v in given.items()}
    return Cell(model, ranks, tuple(hashable.items()), "sgd, ema")


def case(frozen: str, head: str, layout: str, accumulate: int) -> Cell:
    ranks, keys = (LAYOUTS | MORE)[layout]
    accumulate *= 2 if "parallel.pp" in keys else 1  # a pipeline needs as many as it has stages
    return cell(frozen, head, ranks, keys | {"train.accumulate": accumulate})


CASES = {
    (frozen, head, layout, accumulate): case(frozen, head, layout, accumulate)
    for frozen in FROZEN
    for head in HEADS
    for layout in LAYOUTS
    for accumulate in (1, 2)
} | {
    (frozen, head, layout, 2): case(frozen, head, layout, 2)
    for frozen in FROZEN
    for head in HEADS
    for layout in MORE
}
FAST = [
    ("prefix", "inside", "zero3", 1),
    ("prefix", "inside", "zero1", 2),
    ("prefix", "inside", "pp", 1),
    ("prefix", "inside", "zbv", 2),
    ("no_grad", "inside", "zero2", 1),
    ("lora", "inside", "zero3", 2),
]


SLOW = [name for name in CASES if name not in FAST]
CELLS = Cells(map(CASES.__getitem__, FAST), map(CASES.__getitem__, SLOW))


def check(by_rank: list[Result], frozen: str, head: str) -> None:
    alone = cell(frozen, head)
    expected = reference(alone.model, alone.optimizer, keys=alone.keys)
    start = reference(alone.model, alone.optimizer, 1, keys=alone.keys)
    moved = {n for n, p in start.parameters.items() if (p != expected.parameters[n]).any()}
    assert 0 < len(moved) < len(expected.parameters), "some parameters are trained, and others not"
    for result in by_rank:
        assert len(result.losses) == 2 * STEPS, "each step, and an evaluation after it"
        worst = difference(result, expected)
        within(worst, EXACT)


@pytest.mark.parametrize("name", either(FAST, SLOW), ids=lambda name: "-".join(map(str, name)))
def test_equal_to_one_process(name: tuple[str, str, str, int]) -> None:
    check(CELLS[CASES[name]], name[0], name[1])


@pytest.mark.parametrize(
    ("first", "then"),
    either(
        [("pp", "pp")],
        [("pp", "zero3"), ("zero3", "pp"), ("zbv", "pp, zero3"), ("tp", "zbv")],
        several=True,
    ),
)
def test_a_stage_with_nothing_to_train_is_saved_and_loaded(
    first: str, then: str, tmp_path: Path
) -> None:
    one, two = (case("prefix", "inside", layout, 1) for layout in (first, then))
    for result in run_ranks(halves, one.ranks, one, tmp_path, True, timeout=480):
        expected = result
    losses = expected.losses[BEFORE:STEPS] + expected.losses[STEPS + BEFORE :]
    rest = Result(losses, expected.norms[BEFORE:], expected.parameters)
    for result in run_ranks(halves, two.ranks, two, tmp_path, False, timeout=480):
        within(difference(result, rest), EXACT)


def test_ddp_refuses_parameters_without_a_gradient() -> None:
    with pytest.raises(RanksError) as told:
        run_ranks(train, 2, cell("no_grad", "inside", 2))
    # The other rank may still be waiting for this one when the first error ends both.
    assert "`find_unused_parameters=True`" in str(told.value)


def test_all_ranks_refuse_a_model_without_anything_to_train() -> None:
    keys = {"optimizer.groups": [{"match": "*.lora_*", "freeze": True}]}
    made = cell("lora", "inside", 2, keys | PP | {"train.accumulate": 2})
    with pytest.raises(RanksError) as told:
        run_ranks(train, 2, made)
    assert str(told.value).count("ConfigError: no parameter is left to be trained: optimizer") == 2
