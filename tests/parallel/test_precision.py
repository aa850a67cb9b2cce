"""Reduced precision stays near fp32, is alike on all ranks, and has one loss scale."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from hpctrain.config.schema import PrecisionConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers import gpu_support
from hpctrain.engine.parallel import precision
from hpctrain.engine.parallel.precision import Precision
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification, Sums
from tests.bounds import within
from tests.parallel.low_precision import FORMATS, STEPS, check_near
from tests.parallel.parity import FP32, Cell, batch, build, difference, reference, results
from tests.ranks import run_ranks
from tests.steps import Watched

CPU = torch.device("cpu")
ZERO3 = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}

# `make test` tries each format with one model, and the slow tests with both.
BRIEF = {
    ("bf16", "transformer"),
    ("fp16", "conv"),
    ("pure bf16", "conv"),
    ("reduced in bf16", "conv"),
}


def cell(model: str, keys: dict[str, Any]) -> Cell:
    return Cell(model, 2, tuple(keys.items()), steps=STEPS)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=() if (name, model) in BRIEF else pytest.mark.slow)
        for name in FORMATS
        for model in ("transformer", "conv")
    ],
)
def test_within_bounds_of_fp32(name: str, model: str) -> None:
    cells = (cell(model, FORMATS[name]), cell(model, FORMATS[name] | ZERO3))
    expected = reference(model, steps=STEPS, keys=FP32)
    for by_rank in results(cells).values():
        first, second = (difference(result, expected) for result in by_rank)
        assert first == second, "the ranks have the same parameters"
        check_near(by_rank[0], model, name)
        assert max(first) > 1e-6, "the precision must have an effect"


SINGLE: dict[str, tuple[dict[str, Any], ...]] = {
    "conv": ({}, ZERO3),
    "untied": (ZERO3, {"parallel.tp": 2}, {"parallel.pp": 2, "train.accumulate": 2}),
}


@pytest.mark.parametrize("model", SINGLE)
def test_float32_is_equal_to_one_process(model: str) -> None:
    """Other tests of parity train in float64, where a conversion to a smaller format is seen."""
    cells = tuple(Cell(model, 2, (*FP32, *keys.items())) for keys in SINGLE[model])
    for by_rank in results(cells).values():
        for result in by_rank:
            within(difference(result, reference(model, keys=FP32)), 2e-5)


def narrow(cells: tuple[Cell, ...]) -> set[str]:
    """Return the operations of two steps and evaluations that have made floats below float64."""
    found = set()
    for one in cells:
        training = build(one)

        def see(func: Any, out: Any, model: str = one.model) -> None:
            for value in tree_leaves(out):
                floats = isinstance(value, torch.Tensor) and value.is_floating_point()
                if floats and value.dtype != torch.float64:
                    found.add(f"{model}: {func} {value.dtype}")

        with Watched(see):
            training.run(one, 2)
    return found


EVERY_TASK = ("transformer", "gpt", "moe", "conv, batch norm", "fields, unet")
WIDE = (
    *(Cell(model, 2, optimizer="sgd, ema") for model in EVERY_TASK),
    Cell("conv", 2, (*ZERO3.items(), ("train.accumulate", 2)), "adamw"),
    Cell("untied", 2, (("parallel.tp", 2),)),
    Cell("untied", 2, (("parallel.pp", 2), ("train.accumulate", 2))),
    Cell("conv", 2, (("train.compression.kind", "powersgd"),)),
)


def test_float64_is_never_left() -> None:
    """Not by a model, a task, the reduction, the optimizer or an average of the parameters."""
    assert run_ranks(narrow, 2, WIDE) == [set(), set()]


class Louder(Classification):
    """A task whose loss is finite, and so large that its gradient overflows in fp16."""

    factor = 1.0

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        sums = super().sums(outputs, batch)
        loss, count = sums["loss"]
        return {**sums, "loss": (loss * self.factor, count)}


def overflow(keys: dict[str, Any]) -> tuple[list[float], list[bool]]:
    """Make three steps, the second of which overflows on rank 1; return scales and changes."""
    made = cell("conv", {"precision.compute": "fp16"} | keys)
    training = build(made)
    training.step.task = task = Louder(scale=1 / 16)
    scales, changed = [], []
    for number in range(3):
        before = [p.detach().clone() for p in training.model.parameters]
        task.factor = 1e6 if number == 1 and distributed.get_rank() == 1 else 1.0
        training.step(training._share(batch("conv", 0)), 0.1)
        assert training.step.health.problem == "", "it is the loss scale's to decide"
        scales.append(training.model.precision.scale)
        after = training.model.parameters
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return scales, changed


@pytest.mark.parametrize("keys", [{}, ZERO3], ids=["ddp", "zero3"])
def test_an_overflow_on_one_rank_is_left_out_by_all(keys: dict[str, Any]) -> None:
    one, two = run_ranks(overflow, 2, keys)
    assert one == two == ([1024.0, 512.0, 512.0], [True, False, True])


def test_the_scale_grows_again_and_is_kept() -> None:
    precision = Precision(PrecisionConfig("fp16"), CPU)
    fine, inf = torch.tensor(1.0), torch.tensor(float("inf"))
    assert not precision.accepts(fine, inf, fine)
    assert not precision.accepts(fine, torch.tensor(float("nan")), fine)
    assert precision.scale == 16384
    assert all(precision.accepts(fine, fine, fine) for _ in range(1999))
    resumed = Precision(PrecisionConfig("fp16"), CPU)
    resumed.load_state_dict(precision.state_dict())
    assert resumed.scale == 16384
    assert resumed.accepts(fine, fine, fine)
    assert resumed.scale == 32768
    other = Precision(PrecisionConfig("bf16"), CPU)
    other.load_state_dict(resumed.state_dict())
    assert other.scale == 1, "the scale is of fp16 only"


@pytest.mark.parametrize("compute", ["tf32", "fp8"])
def test_formats_that_a_cpu_does_not_have(compute: str) -> None:
    with pytest.raises(ConfigError, match=rf"precision\.compute={compute}: it needs a GPU of"):
        Precision(PrecisionConfig(compute), CPU)


@pytest.mark.parametrize(
    ("architecture", "lacks"),
    [
        ("gfx908:sramecc+:xnack-", {"tf32", "fp8", "flash"}),  # MI100
        ("gfx90a:sramecc+:xnack-", {"tf32", "fp8"}),  # MI250X
        ("gfx942:sramecc+:xnack-", set()),  # MI300X
        ("gfx950:sramecc+:xnack-", set()),  # MI355X
        ("gfx1100", {"tf32", "fp8"}),
        ("gfx1201", {"tf32"}),
    ],
)
def test_amd_gpus_are_told_by_their_architecture(
    architecture: str, lacks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: what torch says of one is planted."""
    gpu = SimpleNamespace(gcnArchName=architecture, name="AMD Instinct")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu.name)
    device = torch.device("cuda", 0)
    found = {what: gpu_support.lack(what, device) for what in ("tf32", "fp8", "flash")}
    assert {what for what, text in found.items() if text} == lacks
    if lacks:
        name = architecture.partition(":")[0]
        assert found["tf32"].endswith(f"AMD Instinct has {name}")
        with pytest.raises(ConfigError, match=r"compute=tf32: it needs a GPU of AMD's arch.*gfx94"):
            Precision(PrecisionConfig("tf32"), device)


def test_only_tf32_computes_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own default for convolutions is tf32; there is no GPU here, only its settings."""
    monkeypatch.setattr(precision, "lack", lambda *_: "")
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    monkeypatch.setattr(cudnn, "allow_tf32", cudnn.allow_tf32)  # the test restores the switch
    try:
        for compute in ("fp32", "tf32", "bf16", "fp16", "fp8", "fp32"):
            Precision(PrecisionConfig(compute), torch.device("cuda"))
            settings = cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
            assert settings == (compute == "tf32",) * 2
            assert (cudnn.conv.fp32_precision == "tf32") == (compute == "tf32")
    finally:
        torch.set_float32_matmul_precision(before)
