"""A pipeline gives the losses, gradient norms and parameters of one process."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees, bubble
from hpctrain.config.schema import ParallelConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan
from hpctrain.engine.parallel.dividing.stages import block_counts, divide
from hpctrain.engine.parallel.reducing.metric_states import MeasuredTask
from hpctrain.engine.supervised.step import Totals
from hpctrain.errors import ConfigError
from hpctrain.models import Transformer
from tests.bounds import EXACT, within
from tests.parallel import low_precision
from tests.parallel.low_precision import FORMATS, check_near
from tests.parallel.parity import (
    MODELS,
    ROWS,
    Cell,
    Cells,
    build,
    check_equal,
    difference,
    either,
    halves,
    reference,
    rest_of,
    results,
)
from tests.ranks import RanksError, run_ranks
from tests.steps import config_with

Keys = dict[str, Any]
PP: Keys = {"parallel.pp": 2, "parallel.dp_replicate": 1, "train.accumulate": 4}
SHARD: Keys = {"parallel.dp_shard": 2}
TP: Keys = {"parallel.tp": 2}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv", "interleaved_zb")


def schedule(name: str) -> Keys:
    return {"parallel.pipeline.schedule": name}


def cell(model: str, ranks: int, *keys: Keys) -> Cell:
    merged = functools.reduce(lambda a, b: a | b, keys, PP)
    return Cell(model, ranks, tuple(merged.items()))


COVERING = [
    *(cell("untied", 2, schedule(name)) for name in SCHEDULES),
    cell("gpt", 2),
    cell("untied", 4, SHARD),
    cell("untied", 4, TP),
]
MORE = [
    cell("untied", 4, {"parallel.dp_replicate": 2}),
    cell("untied", 2, {"train.accumulate": 2}),
    cell("untied", 2, schedule("gpipe"), {"train.accumulate": 2}),
    cell("untied", 2, {"parallel.pipeline.blocks": (1, 3)}),
    cell("gpt", 2, schedule("zbv"), {"train.accumulate": 2}),
    cell("untied", 2, {"train.activation_checkpointing": "full"}),
    cell("untied", 2, schedule("zbv"), {"train.activation_checkpointing": "full"}),
    cell("untied", 2, {"parallel.fsdp.offload": True, "parallel.dp_shard": 1}),
    *(
        cell("untied", 4, SHARD, {"parallel.zero": zero}, schedule(name))
        for name in SCHEDULES
        for zero in (1, 2, 3)
        if zero < 3 or not name.startswith(("zbv", "interleaved_zb"))
    ),
    *(cell("untied", 4, {"parallel.dp_replicate": 2}, schedule(name)) for name in SCHEDULES[1:]),
    *(
        cell(model, 4, TP, schedule(name), {key: False})
        for model in ("untied", "gpt")
        for name in ("1f1b", "interleaved", "zbv")
        for key in ("parallel.sequence_parallel", "parallel.loss_parallel")
    ),
    cell("gpt", 4, TP),
    cell("untied", 4, {"parallel.pp": 4}),
    cell("untied", 8, TP, SHARD),
    cell("untied", 8, TP, SHARD, {"parallel.zero": 2}, schedule("zbv")),
    cell("gpt", 8, TP, {"parallel.dp_replicate": 2}, schedule("interleaved")),
    cell("untied", 8, SHARD, {"parallel.dp_replicate": 2}),
]


CELLS = Cells(COVERING, MORE)


@pytest.mark.parametrize("made", CELLS.params, ids=str)
def test_equal_to_one_process(made: Cell) -> None:
    check_equal(made, CELLS[made])


def lengths(length: int) -> Batch:
    """Return a batch with samples of this length."""
    draw = torch.Generator().manual_seed(length)
    return {
        "tokens": torch.randint(0, 61, (ROWS, length + 1), generator=draw),
        "tokens_document": torch.zeros(ROWS, length + 1, dtype=torch.int32),
        "mask": torch.arange(ROWS) < ROWS - 3,
    }


class Mean(torch.nn.Module):
    """A mean over all ranks, as a metric. Importing torchmetrics takes seconds on each rank."""

    process_group: Any = None
    distributed_available_fn: Any = None

    def reset(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, values: torch.Tensor) -> None:
        self.sums += torch.tensor([values.sum(), len(values)])

    def compute(self) -> torch.Tensor:
        if self.distributed_available_fn():
            distributed.all_reduce(self.sums, group=self.process_group)
        return self.sums[0] / self.sums[1]


def measured_means(outputs: torch.Tensor, _: Batch) -> tuple[torch.Tensor]:
    return (outputs.square().flatten(1).mean(1),)


def losses_of(cells: tuple[Cell, ...], sizes: tuple[int, ...]) -> list[list[float]]:
    """Return losses and a metric of validations between steps, of samples of changing length."""
    found = []
    for made in cells:
        training, losses = build(made), []
        model, task = training.model, training.step.task
        task.metrics, task.measured = {"mean": Mean()}, measured_means
        for length in sizes:
            share = training._share(lengths(length))
            training.step(share, 0.1)
            losses.append(training.step.totals.means()["loss"])
            model.module.eval()
            totals, measured = Totals(), MeasuredTask(task, model.mesh)
            double = {name: torch.cat([value, value]) for name, value in share.items()}
            for given in (double, share):
                totals.add(*model.evaluate(measured.task, given))
                measured.update()
            totals.reduce(model.mesh)
            losses += totals.means()["loss"], measured.values()["mean"]
            model.module.train()
        found.append(losses)
    return found


SIZES = (24, 16, 24, 8, 16)
VALIDATED = [
    pytest.param([cell("untied", 2), cell("untied", 2, schedule("zbv"))], SIZES, id="two ranks"),
    pytest.param(
        [cell("untied", 4, SHARD)], (16, 24), id="sharded-4-ranks", marks=pytest.mark.slow
    ),
    pytest.param(
        [cell("untied", 2, schedule(name)) for name in ("gpipe", "interleaved", "interleaved_zb")],
        SIZES,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        [cell("untied", 4, TP, schedule("zbv"), {"parallel.loss_parallel": False})],
        SIZES,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("cells", "sizes"), VALIDATED)
def test_a_validation_is_that_of_one_process(cells: list[Cell], sizes: tuple[int, ...]) -> None:
    ((expected,),) = run_ranks(losses_of, 1, (Cell("untied", 1),), sizes)
    for found in run_ranks(losses_of, cells[0].ranks, tuple(cells), sizes):
        for losses in found:
            assert losses == pytest.approx(expected, rel=EXACT)


def test_reduced_precision_stays_near_one_process() -> None:
    made = replace(cell("untied", 2, FORMATS["bf16"]), steps=low_precision.STEPS)
    for result in results((made,))[made]:
        check_near(result, "untied", "bf16")


PIPELINES = {
    "single": Cell("untied", 1, (), "adamw", 5),
    "1f1b": Cell("untied", 2, tuple(PP.items()), "adamw", 5),
    "zbv": Cell("untied", 2, tuple((PP | schedule("zbv")).items()), "adamw", 5),
    "zero3": Cell("untied", 4, tuple((PP | SHARD).items()), "adamw", 5),
}


@pytest.mark.parametrize(
    ("source", "to"),
    either(
        [("single", "1f1b"), ("zbv", "single")],
        [("single", "zbv"), ("1f1b", "zero3"), ("zero3", "zbv"), ("zero3", "single")],
        several=True,
    ),
)
def test_checkpoints_go_on_with_another_pipeline(source: str, to: str, tmp_path: Path) -> None:
    run_ranks(halves, PIPELINES[source].ranks, PIPELINES[source], tmp_path, True)
    rest = rest_of(reference("untied", "adamw", 5))
    for result in run_ranks(halves, PIPELINES[to].ranks, PIPELINES[to], tmp_path, False):
        within(difference(result, rest), EXACT)


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("gpipe", 4, 3 / 7),
        ("1f1b", 12, 3 / 15),
        ("interleaved", 4, 3 / 11),
        ("interleaved_zb", 4, 3 / 27),
        ("zbv", 7, 0),
        ("zbv", 4, 3 / 7),
    ],
)
def test_the_expected_bubble(name: str, parts: int, expected: float) -> None:
    assert bubble(name, 4, parts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("costs", "first", "last", "stages", "expected"),
    [
        ([1] * 8, 0, 0, 4, [2, 2, 2, 2]),
        ([1] * 8, 1, 1, 4, [2, 3, 2, 1]),
        ([1] * 126, 1, 1, 16, [7, *[8] * 14, 7]),
        ([1] * 32, 2, 2, 4, [7, 9, 9, 7]),
        ([5, 1, 1, 1], 0, 0, 2, [1, 3]),
        ([1] * 4, 100, 0, 4, [1, 1, 1, 1]),
    ],
)
def test_the_most_expensive_stage_costs_least(
    costs: list[int], first: int, last: int, stages: int, expected: list[int]
) -> None:
    found = divide(costs, first, last, stages)
    assert sum(found) == len(costs)
    assert min(found) >= 1

    def largest(counts: list[int]) -> int:
        ends = [sum(counts[: i + 1]) for i in range(stages)]
        parts = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        parts[0] += first
        parts[-1] += last
        return max(parts)

    assert largest(found) == largest(expected)


def problems(keys: Keys, ranks: int = 2) -> str:
    made = config_with({"train.global_batch_size": 16} | PP | keys)
    return "\n".join(parallel_problems(made, Degrees.of(made.parallel, ranks)))


@pytest.mark.parametrize(
    ("keys", "ranks", "text"),
    [
        ({"train.accumulate": 1}, 2, "1 micro-batches are fewer than the 2 ranks of the pipeline"),
        (
            {"train.accumulate": 1, "parallel.pipeline.schedule": "gpipe"},
            2,
            "of the pipeline; use train.accumulate=2",
        ),
        ({"train.accumulate": 2, "parallel.pp": 4}, 4, "use train.accumulate=4"),
        ({"train.accumulate": 1, "train.micro_batch_size": 16}, 2, "use train.micro_batch_size=8"),
        (
            {
                "train.accumulate": 5,
                "train.global_batch_size": 20,
                "parallel.pipeline.schedule": "interleaved",
            },
            2,
            "5 micro-batches cannot be divided into 2 rounds; use train.accumulate=4 or 10",
        ),
        ({"train.accumulate": 1, "train.global_batch_size": 1}, 2, "=1 is too small for 2 of"),
        ({"parallel.pipeline.blocks": [1, 1, 2]}, 2, "has 3 numbers: parallel.pp=2"),
        ({"parallel.pipeline.blocks": [0, 4]}, 2, "at least 1 block"),
        (
            {"parallel.dp_shard": 2, "parallel.pipeline.schedule": "zbv"},
            4,
            "wrong gradients; use zero=2",
        ),
        ({"parallel.pipeline.schedule": "zbv", "train.compile": "blocks"}, 2, "compiled"),
        (
            {"parallel.pipeline.schedule": "zbv", "train.activation_checkpointing": "selective"},
            2,
            "use full, none or the schedule interleaved",
        ),
        ({"parallel.sync": "every"}, 2, "once per step; use auto or last"),
        ({"data.collate": "pack"}, 2, "a packed batch has no micro-batches"),
        (
            {"train.accumulate": 1, "train.micro_batch_size": "auto"},
            2,
            "give a number, or train.accumulate",
        ),
    ],
)
def test_what_does_not_fit_is_told_before_the_start(keys: Keys, ranks: int, text: str) -> None:
    assert text in problems(keys, ranks)


@pytest.mark.parametrize(
    ("model", "pp", "blocks", "text"),
    [
        ("transformer", 2, None, "embed.weight and head.weight of Transformer are one parameter"),
        ("untied", 5, None, "makes 5 stages, but Transformer has 4 blocks"),
        (
            "untied",
            2,
            [1, 2],
            r"\[1, 2\] has 3 blocks, but Transformer has 4 blocks \(layers\), such",
        ),
        ("conv", 2, None, "ConvNet has no plan for pipeline parallel"),
        ("odd", 2, None, "the plan of Odd puts scale.weight in no stage; it names embed, "),
    ],
)
def test_what_does_not_fit_the_model_is_told(
    model: str, pp: int, blocks: list[int] | None, text: str
) -> None:
    whole = MODELS.get(model, Odd)()
    parallel = ParallelConfig(pp=pp)
    parallel.pipeline.blocks = blocks
    with pytest.raises(ConfigError, match=text):
        block_counts(whole, find_plan(whole, parallel, Degrees(pp=pp)), parallel, pp)


class Odd(Transformer):
    """It has a parameter that its plan does not name."""

    def __init__(self) -> None:
        super().__init__(64, 32, 4, 4)
        self.scale = torch.nn.Linear(1, 1)


def wrong_task(made: Cell) -> str:
    training = build(made)
    task = training.step.task
    try:
        training.model.forward_backward(lambda model, batch: task(model, batch), lengths(24))
    except ConfigError as error:
        return str(error)
    return ""


def wrong_token(made: Cell) -> None:
    training = build(made)
    batch = training._share(lengths(24))
    batch["tokens"][:] = 64
    training.step(batch, 0.1)


def test_a_pipeline_needs_a_task_with_a_cut() -> None:
    for text in run_ranks(wrong_task, 2, cell("untied", 2)):
        assert "a pipeline needs a task that is a hpctrain.tasks.SplitTask" in text


@pytest.mark.slow
def test_an_error_in_a_stage_has_its_own_text() -> None:
    with pytest.raises(RanksError, match=r"ConfigError: model\.vocab_size=64: the data has tokens"):
        run_ranks(wrong_token, 2, cell("untied", 2))


def test_totals_go_on_when_their_names_change() -> None:
    totals = Totals()
    totals.add(["loss", "error"], torch.tensor([6.0, 3.0, 1.0, 2.0]))
    totals.add(["loss"], torch.tensor([2.0, 1.0]))
    totals.add(["error", "loss"], torch.tensor([1.0, 4.0, 0.0, 0.0]))
    assert totals.means() == {"error": 0.25, "loss": 2.0}
