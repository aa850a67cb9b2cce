"""The formulas of memory against the live bytes of real trainings on four ranks."""

import functools
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from hpctrain.config.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.data.types import Batch
from hpctrain.faults.stop import Stop
from hpctrain.parallel.blocks import find_blocks
from hpctrain.parallel.memory import Memory, ModelSizes, memory_of, optimizer_states
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.tasks.task import Sums
from hpctrain.train.step import TrainStep
from tests.parallel.live import Live
from tests.ranks import run_ranks

RANKS, ROWS, STEPS = 4, 2, 3
Keys = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Large blocks, and one row of activations: nearly all memory is that of the parameters."""

    def __init__(self, width: int = 256, blocks: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out

    def init_module(self, module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]


class Measured(NamedTuple):
    """Bytes of one rank: before the first step, between steps, at the peak of a step."""

    built: int
    between: int
    peak: int
    formula: Memory


def task(model: nn.Module, batch: Batch) -> Sums:
    out = model(batch["x"])
    return {"loss": (out.float().square().mean(-1).sum(), batch["mask"].sum())}


def measure(keys: Keys) -> Measured:
    config, cpu = Config(), torch.device("cpu")
    config.train.accumulate = 2
    config.optimizer.options = {"fused": True}  # a CPU has no temporary of all parameters
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), config), name, value)
    ranks = distributed.get_world_size()
    degrees = Degrees.of(config.parallel, ranks)
    mesh = Mesh(degrees, distributed.get_rank(), cpu)
    with torch.device("meta"):
        net = Net()
    sizes = ModelSizes.of(net, [block for _, block in find_blocks(net, [])])
    formula = memory_of(
        sizes, degrees, config.parallel, config.precision, config.optimizer, config.train.accumulate
    )
    batch = {
        "x": torch.zeros(ROWS * config.train.accumulate, 256),
        "mask": torch.ones(ROWS * config.train.accumulate, dtype=torch.bool),
    }
    with Live() as live:
        model = parallelize(Net, config, mesh, Precision(config.precision, cpu))
        built = live.now()
        optimizer: torch.optim.Optimizer
        if config.optimizer._target_.endswith("SGD"):
            optimizer = torch.optim.SGD(model.parameters, lr=0.1, **config.optimizer.options)
        else:
            optimizer = torch.optim.AdamW(model.parameters)
        step = TrainStep(model, task, optimizer, clip_norm=1.0, stop=Stop())
        step(batch, 0.1)
        live.restart()
        for _ in range(STEPS - 1):
            step(batch, 0.1)
    return Measured(built, live.now(), live.peak, formula)


def measure_all(cells: list[Keys]) -> list[Measured]:
    return [measure(keys) for keys in cells]


ZERO: dict[str, Keys] = {
    f"zero{stage}": {
        "parallel.dp_replicate": 1,
        "parallel.dp_shard": -1,
        "parallel.zero": stage,
    }
    for stage in (1, 2, 3)
}
HSDP: Keys = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
ONCE: Keys = {"train.accumulate": 1}
BF16: Keys = {"precision.compute": "bf16"}
PURE: Keys = BF16 | {"precision.params": "bf16"}
STRATEGIES: dict[str, Keys] = {
    "ddp": {},
    **ZERO,
    "hsdp": HSDP,
    "hsdp, zero1": HSDP | {"parallel.zero": 1},
}
# Two micro-batches in each step, unless the name says otherwise.
CELLS: dict[str, Keys] = {
    **STRATEGIES,
    "zero1, one micro-batch": ZERO["zero1"] | ONCE,
    "zero3, one micro-batch": ZERO["zero3"] | ONCE,
    "zero1, bf16": ZERO["zero1"] | BF16,
    "zero3, bf16": ZERO["zero3"] | BF16,
    "zero3, sgd": ZERO["zero3"]
    | {"optimizer._target_": "torch.optim.SGD", "optimizer.options": {"momentum": 0.9}},
}
MORE: dict[str, Keys] = {
    "ddp, own gradients": {"parallel.ddp.gradient_as_bucket_view": False},
    "zero3, reduced last": ZERO["zero3"] | {"parallel.sync": "last"},
    "zero3, prefetch": ZERO["zero3"] | {"parallel.fsdp.prefetch": 2},
    "zero3, parameters over 2": ZERO["zero3"] | {"parallel.fsdp.reshard_after_forward": 2},
    **{
        f"{name}, {formats}{', one micro-batch' * (1 - i)}": keys | dtypes | once
        for name, keys in STRATEGIES.items()
        for formats, dtypes in {"fp32": {}, "bf16": BF16, "pure bf16": PURE}.items()
        for i, once in enumerate([ONCE, {}])
    },
}


@functools.cache
def measured(slow: bool) -> dict[str, list[Measured]]:
    """All cells are measured by one call, which saves their start; by name and rank."""
    cells = MORE if slow else CELLS
    answers = run_ranks(measure_all, RANKS, list(cells.values()), timeout=270)
    return {name: [answer[i] for answer in answers] for i, name in enumerate(cells)}


def within(bytes_: int, formula: int, tolerance: float) -> bool:
    return abs(bytes_ - formula) <= tolerance * formula


def check(by_rank: list[Measured]) -> None:
    for built, between, peak, formula in by_rank:
        # The buckets of DistributedDataParallel exist from its construction on.
        buckets = formula.parameters if formula.kind.startswith("ddp") else 0
        assert within(built, formula.parameters + buckets, 0.01)
        assert within(between, formula.parameters + formula.optimizer + buckets, 0.01)
        assert within(peak, formula.peak, 0.1), f"{peak}\n{formula}"


@pytest.mark.parametrize("name", CELLS)
def test_peak_of_a_step(name: str) -> None:
    check(measured(False)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_peak_of_more_steps(name: str) -> None:
    check(measured(True)[name])


def formula(sizes: ModelSizes, degrees: Degrees, **changes: Any) -> Memory:
    config = Config()
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        setattr(functools.reduce(getattr, section.split("__"), config), name, value)
    return memory_of(
        sizes, degrees, config.parallel, config.precision, config.optimizer, config.train.accumulate
    )


def test_the_bytes_of_the_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs, K = 12."""
    sizes = ModelSizes.counted(block=75_000_000, blocks=100, rest=0)
    pure = {"precision__compute": "bf16", "precision__params": "bf16"}
    alone = formula(sizes, Degrees(), precision__compute="bf16")
    assert alone.states == 16 * 7.5e9  # fp32 where the paper has 2 + 2 + 12 bytes
    divided = formula(sizes, Degrees(dp_shard=64), precision__compute="bf16")
    assert within(divided.states, int(16 * 7.5e9 / 64), 1e-6)
    assert formula(sizes, Degrees(), **pure).states == 8 * 7.5e9
    first = formula(sizes, Degrees(dp_shard=64), parallel__zero=1, train__accumulate=2, **pure)
    assert within(first.gradients, int(2 * 7.5e9), 1e-6)
    assert within(first.gathered, int(2 * 7.5e9), 1e-6)


def test_more_ranks_than_rows() -> None:
    """Three rows over two ranks are two each; over eight they are one, on three ranks."""
    sizes = ModelSizes(((((3, 5)),),), ((7,),))
    assert [sizes.part(n) for n in (1, 2, 8)] == [22, 14, 6]


@pytest.mark.parametrize(
    ("name", "options", "states"),
    [
        ("AdamW", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"centered": True}, 2),
        ("Adagrad", {}, 1),
    ],
)
def test_states_are_those_that_torch_makes(name: str, options: Keys, states: int) -> None:
    made = getattr(torch.optim, name)([parameter := nn.Parameter(torch.zeros(10))], **options)
    parameter.grad = torch.zeros(10)
    made.step()
    of_size = [v for v in made.state[parameter].values() if torch.is_tensor(v) and v.numel() == 10]
    config = Config().optimizer
    config._target_, config.options = f"torch.optim.{name}", options
    assert len(of_size) == optimizer_states(config) == states


def test_tied_parameters_count_once() -> None:
    net = Net(8, 2)
    net.head.weight = net.embed.weight
    sizes = ModelSizes.of(net, net.blocks)
    assert sizes.count == sum(p.numel() for p in net.parameters())
    assert sizes.outside == 8 * 8 + 2 * 8
    assert sizes.largest_block == sum(p.numel() for p in net.blocks[0].parameters())


def test_offload_leaves_what_computes_on_the_device() -> None:
    sizes = ModelSizes.counted(1000, 10, 100)
    kept = formula(sizes, Degrees(dp_shard=2))
    moved = formula(sizes, Degrees(dp_shard=2), parallel__fsdp__offload=True)
    assert moved.peak == moved.gathered + moved.buffers
    assert moved.peak + moved.parameters + moved.gradients + moved.optimizer == kept.peak
    assert "parameters (host)" in str(moved)


def test_it_prints() -> None:
    sizes = ModelSizes.counted(block=218_112_000, blocks=32, rest=1_050_939_392)
    made = formula(sizes, Degrees(dp_shard=64), precision__compute="bf16")
    assert str(made).splitlines() == []


def test_no_torch_is_needed() -> None:
    code = "import sys, hpctrain.parallel.memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
