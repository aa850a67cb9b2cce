"""What a library runs dry leaves a model as it was: shapes of a pipeline, FLOPs, a second pass."""

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.data import generators
from hpctrain.engine.layers.dry_run import BufferValues, dry_run
from hpctrain.engine.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.engine.parallel.preparing.whole_model import prepare_modes
from hpctrain.insight.flops.flops import count_flops, meta_batch
from hpctrain.tasks import Classification
from tests.bounds import EXACT
from tests.parallel.parity import Cell, Normed, batch, build, either
from tests.ranks import run_ranks
from tests.steps import batch as digits

Values = dict[str, torch.Tensor]
PARTS = ("train.accumulate", 4)
PIPELINE = (("parallel.pp", 2), ("parallel.dp_replicate", 1), PARTS)
CELLS = [
    Cell("conv, stages", 2, (*PIPELINE, ("parallel.pipeline.schedule", name)))
    for name in ("1f1b", "gpipe", "interleaved", "zbv", "interleaved_zb")
]


def statistics(cells: list[Cell]) -> list[tuple[Values, float, float]]:
    """Train on batches of two shapes, with evaluations between; return buffers and losses."""
    found = []
    for cell in cells:
        made = build(cell)
        for rows in (16, 8, 16, 8):
            made.step(made._share(batch(cell.model, made.seen, rows)), 0.1)
            made.seen += 1
            made._evaluate(cell)
        named = made.model.module.named_buffers()
        buffers = {name: value.clone() for name, value in named}
        found.append((buffers, made._evaluate(cell), made.step.totals.means()["loss"]))
    return found


@pytest.mark.parametrize("cells", either([CELLS[0::3]], [CELLS]), ids=["some", "more"])
def test_statistics_of_a_pipeline_are_those_of_one_process(cells: list[Cell]) -> None:
    """It has the same micro-batches."""
    expected, loss, trained = run_ranks(statistics, 1, [Cell("conv, stages", 1, (PARTS,))])[0][0]
    for stages in zip(*run_ranks(statistics, 2, cells), strict=True):
        found = stages[0][0] | stages[1][0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=EXACT, atol=EXACT)
        assert {int(found[name]) for name in found if name.endswith("tracked")} == {16}
        for stage in stages:
            assert stage[1:] == pytest.approx((loss, trained), rel=EXACT)


class Scaled(nn.Module):
    """A layer that draws from NumPy and Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (np.random.rand() + random.random())  # noqa: NPY002


class Restless(nn.Module):
    """A model whose every pass changes a buffer, replaces another one, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 10), Scaled()
        )
        self.quiet = nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.zeros(1).expand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.layers(x)


def state(model: nn.Module) -> list[Any]:
    named = model.named_buffers()
    return [
        {name: (id(value), value.tolist()) for name, value in named},
        [module.training for module in model.modules()],
        {name: each.tolist() for name, each in generators.states().items()},
    ]


def test_a_dry_run_leaves_buffers_modes_and_random_numbers() -> None:
    model = Restless()
    before = state(model)
    for forward in (model.train, model.eval):
        with dry_run(model):
            forward()
            model(torch.randn(4, 64))
        assert state(model) == before
    with pytest.raises(RuntimeError), dry_run(model):
        model(torch.randn(4, 64) @ model(torch.randn(4, 64)))
    assert state(model) == before


def test_values_that_are_kept_are_those_of_the_last_time() -> None:
    model = Restless()
    buffers = BufferValues(model, stored=True)
    for calls in (1, 2):
        buffers.keep()
        model(torch.randn(4, 64))
        model(torch.randn(4, 64))
        buffers.restore()
        assert int(model.calls) == int(model.layers[1].num_batches_tracked) == calls - 1
        model(torch.randn(4, 64))


def test_counting_flops_leaves_model_and_task() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    before, task = torch.get_rng_state(), Classification(class_weights=[1.0] * 10)
    assert count_flops(model, task, meta_batch(digits(4))) is not None
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    images = torch.zeros(4, 10)
    task.sums(images, digits(4))  # its weights are not on the meta device


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_second_pass_for_activations_does_not_count(mode: str) -> None:
    torch.manual_seed(0)
    once = Normed(64, 3)
    once.blocks[1].insert(0, Scaled())
    twice = copy.deepcopy(once)
    checkpoint_activations(twice.blocks, mode)
    drawn = list[float]()
    for seed in range(3):
        for model in (once, twice):
            images = digits(8, seed)["image"].float()
            generators.seed_generators(seed)
            model(images).square().sum().backward()
            drawn.append(random.random())
        assert drawn[-2] == drawn[-1]
    assert int(twice.blocks[0][1].num_batches_tracked) == 3
    for a, b in zip(once.buffers(), twice.buffers(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(once.parameters(), twice.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Broken(nn.Sequential):
    """A block that the compiler cannot compile as a whole, so that it leaves it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_nor_does_it_in_a_block_that_cannot_be_compiled(mode: str) -> None:
    block = Broken(nn.Linear(4, 4), nn.BatchNorm1d(4))
    checkpoint_activations([block], mode)
    block.compile(backend="eager")
    block(torch.randn(8, 4)).square().sum().backward()
    assert int(block[1].num_batches_tracked) == 1


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_alike_blocks_are_compiled_once(mode: str) -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]
    checkpoint_activations(blocks, mode)
    torch._dynamo.reset()
    counters.clear()
    for block in blocks:
        block.compile(backend="eager")
        block(torch.randn(8, 4))
    assert counters["stats"]["unique_graphs"] == 1


class Products(TorchDispatchMode):
    """Counts grouped and scaled products of matrices, as experts and float8 compute them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func in (torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_mm.default)
        return func(*args, **(kwargs or {}))

    made = 0


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.grouped_mm(x, self.weight, offs=torch.tensor([8, 32], dtype=torch.int32))
        one, left = torch.ones(()), y.detach().to(torch.float8_e4m3fn)
        right = self.weight[0].detach().to(torch.float8_e4m3fn).t()
        return y * torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def test_selective_checkpointing_keeps_grouped_and_scaled_products() -> None:
    made = {}
    for mode in ("none", "selective", "full"):
        block = Multiplied()
        checkpoint_activations([block], mode)
        with Products() as products:
            block(torch.ones(32, 16, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        made[mode] = products.made
    assert made["selective"] == made["none"] == made["full"] - 2


def test_a_copy_computes_with_its_own_parameters() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    checkpoint_activations([block], "full")
    copied = copy.deepcopy(block).eval()
    nn.init.zeros_(copied[1].weight)
    assert not copied(torch.randn(8, 4)).any()


@pytest.mark.usefixtures("group_of_one")
def test_modes_of_the_constructor_hold(caplog: pytest.LogCaptureFixture) -> None:
    whole, part = Normed().eval(), Normed()
    part.blocks[1].eval()
    with caplog.at_level(logging.INFO):
        prepare_modes(whole, says=True)
        assert all(module.training for module in whole.modules())
        assert caplog.text == ""
        prepare_modes(part, says=True)
    assert "blocks.1 (Sequential): in evaluation mode, as the model has made it" in caplog.text
    assert not part.blocks[1][1].training
    assert part.blocks[0][1].training
