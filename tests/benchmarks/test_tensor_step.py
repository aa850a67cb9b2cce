"""Compares steps of tensor parallel with steps of a torch loop written by hand, on 2 and 4 ranks.

python -m pytest tests/benchmarks/test_tensor_step.py --benchmark-only -s
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from hpctrain.config.schema import ParallelConfig
from tests.benchmarks.steps_in_turns import Batch, Step, medians, model, ours, updates
from tests.ranks import run_ranks

ROUNDS = 20


def by_hand(size: int) -> Step:
    """Return a step as the tutorials of torch write it, with sequence and loss parallel."""
    mesh, bare = init_device_mesh("cpu", (size,)), model()
    parts = Shard(1)
    layer: dict[str, Any] = {
        "attention_norm": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(
            input_layouts=(parts, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None),
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=parts),
        "mlp_norm": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=parts),
    }
    top: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=parts),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(
            input_layouts=parts, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(bare, mesh, top)
    for block in bare.layers:
        parallelize_module(block, mesh, layer)
    update = updates(bare.parameters())

    def step(batch: Batch) -> None:
        tokens = batch["tokens"]
        with loss_parallel():
            logits = bare(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        update()

    return step


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    size = distributed.get_world_size()
    step = ours(ParallelConfig(tp=size), loss_parallel=True)
    return medians({"by hand": by_hand(size), "ours": lambda batch: step(batch, 1e-3)}, 8, ROUNDS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    median = benchmark.pedantic(lambda: run_ranks(measure, ranks, timeout=240)[0], rounds=1)
    ratio = median["ours"] / median["by hand"]
    with capsys.disabled():
        print(f"\ntp {ranks}: {1e3 * median['ours']:.1f} ms, {ratio:.2f} x by hand", end="")
    assert median.keys() == {"by hand", "ours"}
