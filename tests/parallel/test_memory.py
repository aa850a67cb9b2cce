"""The formulas of memory are those of the papers; plan/test_accuracy.py measures beside them."""

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.insight.plan.memory import Memory, memory_of
from hpctrain.insight.plan.model_sizes import ModelSizes
from tests.steps import config_with

Keys = dict[str, Any]


def formula(sizes: ModelSizes, degrees: Degrees, keys: Keys) -> Memory:
    config = config_with(keys)
    return memory_of(sizes, degrees, config, config.train.accumulate)


ZERO1: Keys = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.zero": 1}
BF16: Keys = {"precision.compute": "bf16"}
PURE: Keys = BF16 | {"precision.params": "bf16"}


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
    first = formula(sizes, divided, ZERO1 | PURE | {"train.accumulate": 2})
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


def test_offload_leaves_what_computes_on_the_device() -> None:
    sizes = ModelSizes((((1000,),),) * 10, ((100,),))
    sgd = {"optimizer._target_": "torch.optim.SGD"}
    kept = formula(sizes, Degrees(dp_shard=2), sgd)
    moved = formula(sizes, Degrees(dp_shard=2), sgd | {"parallel.fsdp.offload": True})
    assert states_of(moved) == states_of(kept)
    assert moved.peak == moved.gathered + moved.buffers == kept.peak - states_of(kept)
