"""The random numbers of an evaluation are the same each time, in every layout."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from hpctrain.data.generators import seed_generators, states
from hpctrain.data.shards.types import Batch
from hpctrain.engine.supervised.evaluations import evaluate
from hpctrain.tasks import LanguageModel, on_part
from tests.bounds import EXACT
from tests.parallel.parity import Cell, batch, build
from tests.ranks import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel.tp": 2},
    "cp": {"parallel.cp": 2},
    "pp": {"parallel.pp": 2, "train.accumulate": 2},
    "zbv": {"parallel.pp": 2, "train.accumulate": 4, "parallel.pipeline.schedule": "zbv"},
    "ddp": {"parallel.dp_replicate": 2},
    "zero3": {"parallel.dp_shard": 2},
}


class Noisy(LanguageModel):
    """A language model that replaces tokens by random ones, which come from all generators."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        tokens = batch["tokens"]
        of_numpy = torch.from_numpy(np.random.randint(0, 61, tokens.shape))  # noqa: NPY002
        tokens = tokens.where(torch.rand(tokens.shape) < random.random(), of_numpy)
        return super().inputs(batch | {"tokens": tokens})


def evaluated(layouts: list[dict[str, Any]]) -> list[list[float]]:
    """Evaluate several times in each layout, wherever the generators are."""
    found = []
    for keys in layouts:
        made = build(Cell("untied", distributed.get_world_size(), tuple(keys.items())))
        made.model.module.eval()
        task: Any = on_part(Noisy(documents=True), made.mesh.sequence_part)
        feed: Any = [made._share(batch("untied", number)) for number in (0, 1)]
        losses = []
        for seed in (5, 10):
            seed_generators(seed + distributed.get_rank())
            before = states()
            means = evaluate(made.model, task, feed, lambda: False)
            assert means is not None
            losses.append(means["loss"])
            assert all(torch.equal(before[name], each) for name, each in states().items())
        found.append(losses)
    return found


class Recording(Noisy):
    """Keeps the inputs of each step."""

    def __init__(self) -> None:
        super().__init__(documents=True)
        self.kept: list[torch.Tensor] = []

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        found = super().inputs(batch)
        self.kept.append(found[0])
        return found


def trained() -> list[list[list[int]]]:
    """Return the inputs of two steps of a pipeline, each of which leaves the generators elsewhere.

    A third step is the second one once more, as after a restart.
    """
    made = build(Cell("untied", 2, tuple(LAYOUTS["pp"].items())))
    made.step.task = task = Recording()
    for step in (0, 1, 1):
        seed_generators(distributed.get_rank() + step)
        made.model.step = step
        before = states()
        made.step(made._share(batch("untied", 0)), 0.1)
        assert all(torch.equal(before[name], each) for name, each in states().items())
    return [each.tolist() for each in task.kept]


def test_the_stages_of_a_pipeline_have_the_same_inputs() -> None:
    first, second = run_ranks(trained, 2)
    assert first == second
    assert first[0] != first[1] == first[2]


def test_an_evaluation_draws_the_same_numbers_each_time() -> None:
    (((alone, again),),) = run_ranks(evaluated, 1, [{}])
    assert alone == again
    first, second = run_ranks(evaluated, 2, [*LAYOUTS.values()])
    assert first == second
    for name, (one, two) in zip(LAYOUTS, first, strict=True):
        assert one == two, name
        # The ranks that share samples draw as one process does; others draw other numbers.
        same = one == pytest.approx(alone, rel=EXACT)
        assert same == (name not in ("ddp", "zero3")), name
