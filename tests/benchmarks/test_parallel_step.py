"""Compares a step of each strategy with a step of a DDP loop written by hand, on 2 gloo ranks.

python -m pytest tests/benchmarks/test_parallel_step.py --benchmark-only -s
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

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

ROUNDS = 30
STRATEGIES = {
    "ddp": ParallelConfig(),
    **{f"zero{zero}": ParallelConfig(dp_replicate=1, dp_shard=-1, zero=zero) for zero in (1, 2, 3)},
}


def model() -> Transformer:
    return Transformer(256, 128, 4, 4)


def steps() -> dict[str, Callable[[dict[str, torch.Tensor]], object]]:
    """Return a function for a training step of the loop by hand and of each strategy, by name."""
    cpu, size = torch.device("cpu"), distributed.get_world_size()
    bare = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)

    def by_hand(batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["tokens"]
        logits = bare(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    made: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {"by hand": by_hand}
    for name, parallel in STRATEGIES.items():
        config = Config(parallel=parallel)
        mesh = Mesh(Degrees.of(parallel, size), distributed.get_rank(), cpu)
        ours = parallelize(model, config, mesh, Precision(config.precision, cpu))
        adam = torch.optim.AdamW(ours.parameters)
        step = TrainStep(ours, LanguageModel(), adam, clip_norm=1.0, stop=Stop())
        made[name] = lambda batch, step=step: step(batch, 1e-3)  # type: ignore[misc]
    return made


def measure() -> dict[str, float]:
    """Return the median seconds of a step by name; the step functions take turns."""
    torch.set_num_threads(1)
    made = steps()
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


def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    median = benchmark.pedantic(lambda: run_ranks(measure, 2, timeout=240)[0], rounds=1)
    with capsys.disabled():
        for name, value in median.items():
            ratio = value / median["by hand"]
            print(f"\n{name:>8}: {1e3 * value:6.1f} ms, {ratio:.2f} x by hand", end="")
    assert median.keys() == {"by hand", *STRATEGIES}
