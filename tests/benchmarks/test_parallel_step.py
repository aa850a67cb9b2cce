"""Compares a step of each strategy with a step of a DDP loop written by hand, on 2 gloo ranks.

python -m pytest tests/benchmarks/test_parallel_step.py --benchmark-only -s

The steps take turns, and the medians are compared.
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

from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.models import Transformer
from hpctrain.tasks import LanguageModel
from tests.parallel.parity import spread
from tests.ranks import run_ranks
from tests.steps import step_of

Step = Callable[[dict[str, torch.Tensor]], object]
ROUNDS, WARM = 30, 3
ROWS, VOCABULARY = 8, 256
STRATEGIES = {
    "ddp": ParallelConfig(),
    **{f"zero{zero}": ParallelConfig(dp_replicate=1, dp_shard=-1, zero=zero) for zero in (1, 2, 3)},
}


def model() -> Transformer:
    return Transformer(VOCABULARY, 128, 4, 4)


def by_hand() -> Step:
    bare = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)

    def step(batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["tokens"]
        logits = bare(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(parallel: ParallelConfig) -> Step:
    config = Config(parallel=parallel)
    config.train.accumulate = 1
    made = spread(model, config)
    step = step_of(made, LanguageModel(), torch.optim.AdamW(made.parameters), clip_norm=1.0)
    return lambda batch: step(batch, 1e-3)


def measure() -> dict[str, float]:
    """Return the median seconds of a step by name."""
    torch.set_num_threads(1)
    made = {"by hand": by_hand(), **{name: ours(each) for name, each in STRATEGIES.items()}}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(ROUNDS + WARM):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (ROWS, 129), generator=draw)
        batch = {"tokens": tokens, "mask": torch.ones(ROWS, dtype=torch.bool)}
        for name, step in made.items():
            distributed.barrier()
            began = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[WARM:]) for name, values in seconds.items()}


def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    median = benchmark.pedantic(lambda: run_ranks(measure, 2, timeout=240)[0], rounds=1)
    with capsys.disabled():
        for name, value in median.items():
            ratio = value / median["by hand"]
            print(f"\n{name:>8}: {1e3 * value:6.1f} ms, {ratio:.2f} x by hand", end="")
    assert median.keys() == {"by hand", *STRATEGIES}
