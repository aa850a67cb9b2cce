"""Compares a step of each strategy with a step of a DDP loop written by hand, on 2 gloo ranks.

python -m pytest tests/benchmarks/test_parallel_step.py --benchmark-only -s
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import ParallelConfig
from tests.benchmarks.steps_in_turns import Batch, Step, medians, model, ours, updates
from tests.ranks import run_ranks

ROUNDS = 30
STRATEGIES = {
    "ddp": ParallelConfig(),
    **{f"zero{zero}": ParallelConfig(dp_replicate=1, dp_shard=-1, zero=zero) for zero in (1, 2, 3)},
}


def by_hand() -> Step:
    bare = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    update = updates(bare.parameters())

    def step(batch: Batch) -> None:
        tokens = batch["tokens"]
        logits = bare(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        update()

    return step


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    made = {"by hand": by_hand()}
    for name, parallel in STRATEGIES.items():
        step = ours(parallel)
        made[name] = lambda batch, step=step: step(batch, 1e-3)  # type: ignore[misc]
    return medians(made, 8, ROUNDS)


def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    median = benchmark.pedantic(lambda: run_ranks(measure, 2, timeout=240)[0], rounds=1)
    with capsys.disabled():
        for name, value in median.items():
            ratio = value / median["by hand"]
            print(f"\n{name:>8}: {1e3 * value:6.1f} ms, {ratio:.2f} x by hand", end="")
    assert median.keys() == {"by hand", *STRATEGIES}
