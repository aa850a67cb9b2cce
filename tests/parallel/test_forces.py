"""A gradient within a step that is differentiated again, such as forces, is that of one process.

The model computes it from its inputs (forces), and may call its blocks once more; or the task does
(a gradient penalty), or uses it as a number (adversarial samples). Evaluations compute it, too.
"""

from typing import Any

import pytest

from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, Cells, difference, either, reference, train
from tests.ranks import RanksError, run_ranks

Keys = dict[str, Any]
MODELS = ("forces", "forces, then again", "forces, penalty", "forces, adversarial")
SHARD: Keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
LAYOUTS: dict[str, tuple[int, Keys]] = {
    "ddp": (2, {}),
    "zero1": (2, SHARD | {"parallel.zero": 1}),
    "zero1, accumulate": (2, SHARD | {"parallel.zero": 1, "train.accumulate": 2}),
    "zero2": (2, SHARD | {"parallel.zero": 2}),
    "zero3": (2, SHARD),
    "zero3, accumulate": (2, SHARD | {"train.accumulate": 2}),
    "agree": (2, SHARD | {"parallel.fsdp.agree": True}),
    "offload": (2, SHARD | {"parallel.fsdp.offload": True}),
    "checkpointing": (2, SHARD | {"train.activation_checkpointing": "full"}),
    "hsdp": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "parameters over 2": (4, SHARD | {"parallel.fsdp.reshard_after_forward": 2}),
}
CASES = {
    (model, layout): Cell(model, ranks, tuple(keys.items()), "sgd, ema")
    for model in MODELS
    for layout, (ranks, keys) in LAYOUTS.items()
}
FAST = [("forces", "zero3"), ("forces", "ddp"), ("forces, then again", "zero1, accumulate")]


SLOW = [name for name in CASES if name not in FAST]
CELLS = Cells(map(CASES.__getitem__, FAST), map(CASES.__getitem__, SLOW))


@pytest.mark.parametrize("name", either(FAST, SLOW), ids=", ".join)
def test_equal_to_one_process(name: tuple[str, str]) -> None:
    made = CASES[name]
    for result in CELLS[made]:
        worst = difference(result, reference(made.model, made.optimizer))
        within(worst, EXACT)


@pytest.mark.parametrize(
    ("ranks", "keys", "said"),
    [
        (2, {"parallel.tp": 2}, "parallel.tp=2: the model computes a gradient that is"),
        pytest.param(
            *(2, {"parallel.pp": 2, "parallel.dp_replicate": 1, "train.accumulate": 2}),
            "parallel.pp=2: the model computes a gradient that is",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_differentiated_again_is_refused(ranks: int, keys: Keys, said: str) -> None:
    with pytest.raises(RanksError) as told:
        run_ranks(train, ranks, Cell("forces", ranks, tuple(keys.items())))
    assert said in str(told.value)
    say = 1 if "parallel.pp" in keys else ranks  # a later stage waits for the first one
    assert str(told.value).count("ConfigError: ") >= say
