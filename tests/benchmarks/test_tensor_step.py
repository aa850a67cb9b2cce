"""Compares steps of tensor parallel with steps of a torch loop written by hand, on 2 and 4 ranks.

python -m pytest tests/benchmarks/test_tensor_step.py --benchmark-only -s
"""

import statistics
import time
from collections.abc import Callable
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

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.faults.stop import Stop
from hpctrain.models import Transformer
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.tasks import LanguageModel
from hpctrain.training.step import TrainStep
from tests.ranks import run_ranks

ROUNDS = 20
Step = Callable[[dict[str, torch.Tensor]], object]


def model() -> Transformer:
    return Transformer(256, 128, 4, 4)


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
    parameters = list(bare.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step(batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["tokens"]
        with loss_parallel():
            logits = bare(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(size: int) -> Step:
    cpu, config = torch.device("cpu"), Config(parallel=ParallelConfig(tp=size))
    mesh = Mesh(Degrees.of(config.parallel, size), distributed.get_rank(), cpu)
    precision = Precision(config.precision, cpu)
    made = parallelize(model, config, mesh, precision, loss_parallel=True)
    adam = torch.optim.AdamW(made.parameters)
    step = TrainStep(made, LanguageModel(), adam, clip_norm=1.0, stop=Stop())
    return lambda batch: step(batch, 1e-3)


def measure() -> dict[str, float]:
    """Return the median seconds of a step by name; the two take turns."""
    torch.set_num_threads(1)
    size = distributed.get_world_size()
    made = {"by hand": by_hand(size), "ours": ours(size)}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(ROUNDS + 3):
        draw = torch.Generator().manual_seed(number)
        batch = {
            "tokens": torch.randint(0, 256, (8, 129), generator=draw),
            "mask": torch.ones(8, dtype=torch.bool),
        }
        for name, step in made.items():
            distributed.barrier()
            began = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[3:]) for name, values in seconds.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    median = benchmark.pedantic(lambda: run_ranks(measure, ranks, timeout=240)[0], rounds=1)
    ratio = median["ours"] / median["by hand"]
    with capsys.disabled():
        print(f"\ntp {ranks}: {1e3 * median['ours']:.1f} ms, {ratio:.2f} x by hand", end="")
    assert median.keys() == {"by hand", "ours"}
