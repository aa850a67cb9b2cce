"""The formulas of memory agree with the live bytes of real trainings on four ranks."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.tasks.task import Sums
from hpctrain.insight.plan.memory import Memory, memory_of
from hpctrain.insight.plan.model_sizes import ModelSizes
from tests.parallel.live import Live
from tests.parallel.parity import spread
from tests.ranks import run_ranks
from tests.steps import config_with, step_of

RANKS, ROWS, STEPS = 4, 2, 2
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
    """A model with large blocks. With few rows, nearly all memory is that of the parameters."""

    def __init__(self, outside: int = 256, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(outside, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out

    def init_module(self, module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]


class Measured(NamedTuple):
    """Bytes of one rank: before the first step, between steps, and at the peak of a step."""

    built: int
    between: int
    peak: int
    formula: Memory


def task(model: nn.Module, batch: Batch) -> Sums:
    out = model(batch["x"])
    return {"loss": (out.float().square().mean(-1).sum(), batch["mask"].sum())}


def formula(sizes: ModelSizes, degrees: Degrees, keys: Keys) -> Memory:
    config = config_with(keys)
    return memory_of(sizes, degrees, config, config.train.accumulate)


def measure(outside: int, blocks: int, keys: Keys) -> Measured:
    # A CPU makes no temporary copy of all parameters, and neither does a fused optimizer on a GPU.
    keys = {"train.accumulate": 2, "optimizer.options": {"fused": True}} | keys
    config = config_with(keys)
    degrees = Degrees.of(config.parallel, distributed.get_world_size())
    build = functools.partial(Net, outside, blocks=blocks)
    with torch.device("meta"):
        net = build()
    sizes = ModelSizes.of(net, [block for _, block in find_blocks(net, [])])
    predicted = formula(sizes, degrees, keys)
    batch = {
        "x": torch.zeros(ROWS * config.train.accumulate, outside),
        "mask": torch.ones(ROWS * config.train.accumulate, dtype=torch.bool),
    }
    with Live() as live:
        model = spread(build, config)
        built = live.now()
        optimizer: torch.optim.Optimizer
        if config.optimizer._target_.endswith("SGD"):
            optimizer = torch.optim.SGD(model.parameters, lr=0.1, **config.optimizer.options)
        else:
            optimizer = torch.optim.AdamW(model.parameters)
        step = step_of(model, task, optimizer, clip_norm=1.0)
        step(batch, 0.1)
        live.restart()
        for _ in range(STEPS - 1):
            step(batch, 0.1)
    return Measured(built, live.now(), live.peak, predicted)


def measure_all(outside: int, blocks: int, cells: list[Keys]) -> list[Measured]:
    return [measure(outside, blocks, keys) for keys in cells]


ZERO: dict[str, Keys] = {
    f"zero{stage}": {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": stage}
    for stage in (1, 2, 3)
}
HSDP: Keys = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
ONCE: Keys = {"train.accumulate": 1}
BF16: Keys = {"precision.compute": "bf16"}
PURE: Keys = BF16 | {"precision.params": "bf16"}
STRATEGIES: dict[str, Keys] = {"ddp": {}, **ZERO, "hsdp": HSDP}
# Each step has two micro-batches, unless the name says otherwise.
CELLS: dict[str, Keys] = {
    **STRATEGIES,
    "zero3, one micro-batch": ZERO["zero3"] | ONCE,
    "zero1, bf16": ZERO["zero1"] | BF16,
}
MORE: dict[str, Keys] = {
    "hsdp, zero1": HSDP | {"parallel.zero": 1},
    "zero3, sgd": ZERO["zero3"]
    | {"optimizer._target_": "torch.optim.SGD", "optimizer.options": {"momentum": 0.9}},
    "zero3, reduced last": ZERO["zero3"] | {"parallel.sync": "last"},
    "zero3, parameters over 2": ZERO["zero3"] | {"parallel.fsdp.reshard_after_forward": 2},
    **{
        f"{name}, {formats}{', one micro-batch' * (1 - i)}": keys | dtypes | once
        for name, keys in STRATEGIES.items()
        for formats, dtypes in {"fp32": {}, "bf16": BF16, "pure bf16": PURE}.items()
        for i, once in enumerate([ONCE, {}])
    },
}


# The embeddings and the head are larger than all blocks together.
LARGE: dict[str, Keys] = {
    "zero3": ZERO["zero3"],
    "zero3, bf16, one micro-batch": ZERO["zero3"] | BF16 | ONCE,
}


# The width of embeddings and head, the number of blocks, and the cells.
KINDS = {"some": (256, 4, CELLS), "large": (6_000, 4, LARGE), "more": (256, 8, MORE)}


@functools.cache
def measured(kind: str) -> dict[str, list[Measured]]:
    """Measure the cells in one call, which saves start-up time; return them by name and rank."""
    outside, blocks, cells = KINDS[kind]
    answers = run_ranks(measure_all, RANKS, outside, blocks, list(cells.values()), timeout=540)
    return {name: [answer[i] for answer in answers] for i, name in enumerate(cells)}


def within(bytes_: int, formula: int, tolerance: float) -> bool:
    return abs(bytes_ - formula) <= tolerance * formula


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (*_, cells) in KINDS.items() for name in cells]
)
def test_peak_of_a_step(kind: str, name: str) -> None:
    for built, between, peak, formula in measured(kind)[name]:
        # The buckets of DistributedDataParallel exist as soon as it is constructed.
        buckets = formula.parameters if name.startswith("ddp") else 0
        assert within(built, formula.parameters + buckets, 0.01)
        assert within(between, formula.parameters + formula.optimizer + buckets, 0.01)
        assert within(peak, formula.peak, 0.1), f"{peak}\n{formula}"


def states_of(memory: Memory) -> int:
    """The model states of the ZeRO paper."""
    return memory.parameters + memory.gradients + memory.optimizer


def test_the_bytes_of_the_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs, K = 12."""
    count = 7_500_000_000
    sizes = ModelSizes((((count // 100,),),) * 100, ((0,),))
    alone, divided = Degrees(), Degrees(dp_shard=64)
    # The paper counts 2 + 2 + 12 bytes; its master copy in fp32 is our parameter.
    assert states_of(formula(sizes, alone, BF16)) == 16 * count
    assert states_of(formula(sizes, divided, BF16)) == 16 * count // 64
    assert states_of(formula(sizes, alone, PURE)) == 8 * count
    first = formula(sizes, divided, ZERO["zero1"] | PURE | {"train.accumulate": 2})
    assert first.gathered == first.gradients == 2 * count
    assert first.optimizer == 4 * count // 64


def test_more_ranks_than_rows() -> None:
    """Of three rows, each of two ranks has at most two, and each of eight ranks at most one."""
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
    assert len(of_size) == config.states == states


def test_tied_parameters_count_once() -> None:
    net = Net(8, 8, 2)
    net.head.weight = net.embed.weight
    sizes = ModelSizes.of(net, net.blocks)
    assert sizes.count == sum(p.numel() for p in net.parameters())
    assert sizes.outside == 8 * 8 + 2 * 8
    assert sizes.largest_block == sum(p.numel() for p in net.blocks[0].parameters())


def test_offload_leaves_what_computes_on_the_device() -> None:
    sizes = ModelSizes((((1000,),),) * 10, ((100,),))
    sgd = {"optimizer._target_": "torch.optim.SGD"}
    kept = formula(sizes, Degrees(dp_shard=2), sgd)
    moved = formula(sizes, Degrees(dp_shard=2), sgd | {"parallel.fsdp.offload": True})
    assert states_of(moved) == states_of(kept)
    assert moved.peak == moved.gathered + moved.buffers == kept.peak - states_of(kept)
