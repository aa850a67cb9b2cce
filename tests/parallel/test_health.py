"""Steps whose numbers are not finite: every layout and precision notices and decides alike."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from hpctrain.data.shards.types import Batch
from hpctrain.engine.faults.health import Health, Judged, RolledBack
from hpctrain.errors import HealthError
from hpctrain.tasks import SplitTask, Sums
from tests.parallel.parity import Cell, batch, build, either
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "transformer", {}),
    "ddp": (2, "conv, batch norm", {"parallel.dp_replicate": 2}),
    "zero1": (2, "transformer", {"parallel.dp_shard": 2, "parallel.zero": 1}),
    "zero3": (2, "conv", {"parallel.dp_shard": 2, "parallel.zero": 3}),
    "hsdp": (4, "conv", {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "tp": (2, "untied", {"parallel.tp": 2}),
    "tp, zero3": (4, "untied", {"parallel.tp": 2, "parallel.dp_shard": 2}),
    "pp": (4, "untied", {"parallel.pp": 2, "parallel.dp_replicate": 2, "train.accumulate": 2}),
    "cp": (2, "untied", {"parallel.cp": 2}),
    "ep": (2, "moe", {"parallel.dp_shard": 2, "parallel.ep": 2}),
    "unclipped": (2, "conv", {"parallel.dp_shard": 2, "train.clip_norm": None}),
    "fp16": (2, "conv", {"parallel.dp_shard": 2, "precision.compute": "fp16"}),
    "bf16": (2, "transformer", {"parallel.dp_replicate": 2, "precision.compute": "bf16"}),
}


class Poisoned(SplitTask):
    """A task that can spoil the loss, only the gradient, or the count, on this rank.

    Attributes:
        poison: "loss" makes the loss NaN, "gradient" only its gradient, and "count" its count 0,
            as in a batch without an object to detect; "" changes nothing.
    """

    def __init__(self, task: Any) -> None:
        self.task, self.poison = task, ""
        self.loss_parallel = task.loss_parallel

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        given: tuple[torch.Tensor, ...] = self.task.inputs(batch)
        return given

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        sums: Sums = self.task.sums(outputs, batch)
        loss, count = sums["loss"]
        if self.poison == "loss":
            loss = loss * float("nan")
        elif self.poison == "gradient":
            loss = loss + (loss * 0).sqrt()  # 0, whose derivative is infinite times 0
        elif self.poison == "count":
            count = count * 0
        return {**sums, "loss": (loss, count)}


def state(training: Any) -> list[torch.Tensor]:
    """Return copies of this rank's parameters, buffers and optimizer state."""
    step = training.step
    values = [*step.model.parameters, *step.model.module.buffers()]
    values += [
        value
        for p in step.model.parameters
        for value in step.optimizer.state.get(p, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    local = (v.to_local() if isinstance(v, DTensor) else v for v in values)
    return [value.detach().clone() for value in local]


def judged(layout: str, folder: Path) -> list[str]:
    """Make good and poisoned steps; return what the ranks would have stopped with."""
    ranks, model, keys = LAYOUTS[layout]
    health = Health("skip", budget=2, run=folder)
    training = build(Cell(model, ranks, tuple(keys.items())), health)
    step, mesh = training.step, training.mesh
    step.task = task = Poisoned(step.task)
    training.run(Cell(model, ranks), 2)
    stops = []
    for poison in ("loss", "gradient", "count"):
        before = state(training)
        # Of the ranks that divide a layer, all have the NaN, as they have the same numbers.
        task.poison = poison if poison == "count" or mesh.dp_rank == mesh.dp_size - 1 else ""
        step(training._share(batch(model, training.seen)), 0.1)
        task.poison = ""
        assert all(map(torch.equal, before, state(training))), "the update was made"
        if (layout, poison) == ("fp16", "gradient"):
            assert health.problem == "", "an overflow is the loss scale's"
            step.totals.means()
        else:
            assert health.problem == poison
            assert step.totals.means() == {}, "the sums count"
            stops.append(decided(health, poison))
        training.run(Cell(model, ranks), 1)
        assert health.problem == ""
        assert not all(map(torch.equal, before, state(training))), "the run does not go on"
    assert all(0 < loss < 100 for loss in training.losses)
    return stops


def decided(health: Health, problem: str) -> str:
    """Return the error of the policy `stop`, after the other two have decided as they should."""
    rank = distributed.get_rank()
    *_, (numbers, _) = health._offered.take(late=False)
    facts = (problem, Judged(3, 48, lambda: [("shard.h5", rank)], own_loss=numbers[2]))
    health.policy = "rollback"
    with pytest.raises(RolledBack):
        health.respond(*facts)
    health.policy, health._steps = "stop", []
    with pytest.raises(HealthError) as stopped:
        health.respond(*facts)
    health.policy = "skip"
    health.respond(*facts)
    return str(stopped.value)


# `make test` tries one layout of each kind of group, and the slow tests all. That of fp16 shards.
BRIEF = ("single", "tp", "pp", "fp16")


@pytest.mark.parametrize("layout", either(BRIEF, [n for n in LAYOUTS if n not in BRIEF]))
def test_no_update_is_made_on_any_rank(layout: str, tmp_path: Path) -> None:
    ranks = LAYOUTS[layout][0]
    first, *others = run_ranks(judged, ranks, layout, tmp_path)
    assert all(other == first for other in others), "the ranks decide differently"
    degrees = {"single": 0, "tp": 0, "tp, zero3": 2, "pp": 3, "hsdp": 3}
    bad = 0 if layout == "cp" else degrees.get(layout, 1)  # the first with the last samples
    host = socket.gethostname()
    assert first[0].startswith(f"loss is not finite since step 3 (first on rank {bad}, {host})")
    assert f"its samples: shard.h5 row {bad}" in first[0]
    for text in first[1:-1]:
        assert text.startswith("gradient is not finite since step 3; its samples: shard.h5 row 0")
    nothing = "nothing counts in step 3: the count of the task's loss is 0; its samples: shard.h5 "
    assert first[-1].startswith(nothing)
    assert "If that is right for the data, train.nonfinite=skip leaves out such" in first[-1]


def noticed() -> str:
    """Return the problem of a step with a NaN gradient on one rank, which is compressed."""
    keys = {"parallel.dp_replicate": 2, "train.compression.kind": "powersgd"}
    training = build(Cell("conv", 2, tuple(keys.items())))
    training.step.task = task = Poisoned(training.step.task)
    training.run(Cell("conv", 2), 1)
    task.poison = "gradient" * distributed.get_rank()
    training.step(training._share(batch("conv", 1)), 0.1)
    return training.step.health.problem


def test_compression_does_not_hide_a_nan() -> None:
    assert run_ranks(noticed, 2) == ["gradient"] * 2
