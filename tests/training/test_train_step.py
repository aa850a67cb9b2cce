"""Tests of the training step, its totals, precision and schedule, in a process group of one."""

import math
from pathlib import Path

import pytest
import torch

from hpctrain.config.schema import PrecisionConfig, SchedulerConfig
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.faults.health import Health
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.reducing.scalars import over
from hpctrain.engine.supervised.schedule import Schedule
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.tasks import Classification
from tests.bounds import EXACT
from tests.steps import ALONE, batch, make, step_of, weights

pytestmark = pytest.mark.usefixtures("group_of_one")


def test_accumulation_changes_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    whole, parts = make(), make(accumulate=4)
    for seed in range(3):
        whole(batch(32, seed), 1e-2)
        parts(batch(32, seed), 1e-2)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=EXACT)
    one, four = whole.totals.means(), parts.totals.means()
    assert one == pytest.approx(four, rel=EXACT)


def test_masked_rows_count_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    full, padded = make(), make()
    real = batch(24)
    filled = {name: torch.cat([values, values[:8]]) for name, values in real.items()}
    filled["mask"][24:] = False
    full(real, 1e-2)
    padded(filled, 1e-2)
    assert torch.allclose(weights(full), weights(padded), rtol=0, atol=EXACT)
    means = full.totals.means()
    assert means == pytest.approx(padded.totals.means(), rel=EXACT)
    # A report is the mean over all samples of its steps; with a rate of 0 they change nothing.
    losses = {}
    for sizes in ((24,), (8,), (24, 8)):
        for rows in sizes:
            full(batch(rows), 0.0)
        losses[sizes] = full.totals.means()["loss"]
    both = (24 * losses[24,] + 8 * losses[8,]) / 32
    assert losses[24, 8] == pytest.approx(both, rel=EXACT)


def test_a_cpu_takes_only_a_count_of_zero_as_one() -> None:
    counts = (0.0, 0.23, 7.0)
    assert [over(1.0, count) for count in counts] == [1.0, 1 / 0.23, 1 / 7.0]
    of_a_gpu = (over(1.0, torch.tensor(count, dtype=torch.float64)) for count in counts)
    assert [*map(float, of_a_gpu)] == [math.inf, 1 / 0.23, 1 / 7.0]
    torch.set_default_dtype(torch.float64)
    light, full = make(), make()
    # The mean is the same for any weight; Adam's would not even show another gradient.
    light.task = Classification(class_weights=[0.01] * 10)
    for step in (light, full):
        step.optimizer = torch.optim.SGD(step.model.parameters, lr=1.0)
        step(batch(23), 1.0)
    assert float(light.grad_norm) == pytest.approx(float(full.grad_norm), rel=EXACT)
    assert torch.allclose(weights(light), weights(full), rtol=0, atol=EXACT)
    light.totals.means()
    assert light.totals.counts["loss"] == pytest.approx(0.23, rel=EXACT)
    nothing = batch(4) | {"mask": torch.zeros(4, dtype=torch.bool)}
    before = weights(light)
    light(nothing, 1.0)
    assert torch.equal(weights(light), before)


def test_clipping_is_of_the_global_norm() -> None:
    torch.set_default_dtype(torch.float64)
    step = make(clip_norm=0.01)
    step.optimizer = torch.optim.SGD(step.model.parameters, lr=1.0)
    before = weights(step)
    step(batch(32), 1.0)
    assert (weights(step) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def grouped(*rates: float | torch.Tensor | None) -> TrainStep:
    """Return a step whose optimizer was made with 0.003, and has groups with these rates."""
    step = make()
    parts = zip(step.model.parameters[: len(rates) - 1], rates, strict=False)
    groups = [{"params": [p], "lr": lr} for p, lr in parts]
    groups.append({"params": step.model.parameters[len(rates) - 1 :], "lr": rates[-1]})
    given = [{k: v for k, v in group.items() if v is not None} for group in groups]
    optimizer = torch.optim.AdamW(given, lr=0.003)
    return step_of(step.model, step.task, optimizer, base_lr=0.003)


def test_groups_of_parameters_keep_the_ratio_of_their_rates(tmp_path: Path) -> None:
    def rates(step: TrainStep) -> list[float]:
        return [float(group["lr"]) for group in step.optimizer.param_groups]

    step = grouped(None, 0.0003, torch.tensor(0.006))
    tensor = step.optimizer.param_groups[2]["lr"]
    before = [p.detach().clone() for p in step.model.parameters]
    step(batch(16), 0.0015)  # the schedule is at a half
    assert rates(step) == pytest.approx([0.0015, 0.00015, 0.003])
    assert step.optimizer.param_groups[2]["lr"] is tensor
    pairs = zip(step.model.parameters, before, strict=True)
    moved = [float((p.detach() - old).abs().max()) for p, old in pairs]
    assert moved[:3] == pytest.approx([0.0015, 0.00015, 0.003], rel=2e-2)  # Adam's first step
    # A checkpoint has the rates of its last step, which are not those that the run began with.
    saved = Checkpointer(tmp_path, 2, ALONE, step.model, step.optimizer)
    saved.save(1, {"step": 1})
    again = grouped(None, 0.0003, torch.tensor(0.006))
    loaded = Checkpointer(tmp_path, 2, ALONE, again.model, again.optimizer)
    assert loaded.load_latest() == {"step": 1}
    assert rates(again) == pytest.approx([0.0015, 0.00015, 0.003])
    for each in (step, again):
        each(batch(16, 1), 0.003)
        assert rates(each) == pytest.approx([0.003, 0.0003, 0.006])
    assert torch.equal(weights(step), weights(again))


def test_schedule() -> None:
    cosine = Schedule(2.0, SchedulerConfig("cosine", final_ratio=0.1), 104, warmup=4)
    assert [cosine(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert cosine(4) == 2.0
    assert cosine(54) == pytest.approx(1.1)
    assert cosine(104) == cosine(1000) == pytest.approx(0.2)
    assert Schedule(2.0, SchedulerConfig("constant"), 10)(9) == 2.0
    assert Schedule(2.0, SchedulerConfig("linear"), 10)(5) == 1.0


@pytest.mark.parametrize(
    ("loss", "norm", "problem"),
    [
        (1.0, 2.0, ""),
        (math.nan, 2.0, "loss"),
        (1.0, math.inf, "gradient"),
        (math.inf, None, "loss"),
    ],
)
def test_what_is_not_finite_is_judged(loss: float, norm: float | None, problem: str) -> None:
    summed, one = torch.tensor(loss, dtype=torch.float64), torch.tensor(1.0)
    given = None if norm is None else torch.tensor(norm)
    for health in (Health(), Health("skip")):
        assert health.accepts(summed, given, summed, one) is (problem == "")
        assert health.problem == problem


def test_the_loss_scale_of_fp16_has_a_limit() -> None:
    step = make()
    step.model.precision = Precision(PrecisionConfig("fp16"), torch.device("cpu"))
    before, seen = weights(step), []
    step.model.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    for number in range(32):
        step(batch(8, number), 1e-2)
        seen.append((step.model.precision.scale, step.health.problem))
    assert seen[:3] == [(2.0**15, ""), (2.0**14, ""), (2.0**13, "")]
    assert seen[28:31] == [(2.0**-13, ""), (2.0**-14, "gradient"), (2.0**-14, "gradient")]
    # A loss that is not finite has another cause, so the scale stays.
    step = make()
    step.model.precision = precision = Precision(PrecisionConfig("fp16"), torch.device("cpu"))
    step.model.module.register_forward_hook(lambda *given: given[2] * float("nan"))
    step(batch(8), 1e-2)
    assert (precision.scale, step.health.problem) == (2.0**16, "loss")
    assert torch.equal(weights(step), before)
