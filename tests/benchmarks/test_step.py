"""Compares a trainer step with a bare PyTorch loop, on a model so small that overhead shows.

python -m pytest tests/benchmarks --benchmark-only
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpctrain.config.schema import ParallelConfig
from hpctrain.distributed.group import process_group
from hpctrain.distributed.ranks import RankInfo
from hpctrain.faults.stop import Stop
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from hpctrain.train.step import TrainStep
from tests.steps import alone


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    ranks = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    with process_group(ranks, ParallelConfig(device="cpu")):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.mark.parametrize("who", ["bare loop", "hpctrain"])
def test_step(benchmark: Any, who: str) -> None:
    model = MLP(64, [256, 256], 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {
        "image": torch.randint(0, 16, (64, 1, 8, 8), dtype=torch.uint8),
        "label": torch.randint(0, 10, (64,)),
        "mask": torch.ones(64, dtype=torch.bool),
    }

    def bare() -> None:
        loss = F.cross_entropy(model(batch["image"].float() / 16), batch["label"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step = TrainStep(
        alone(model),
        Classification(scale=1 / 16),
        optimizer,
        clip_norm=1.0,
        stop=Stop(),
    )
    benchmark.pedantic(
        bare if who == "bare loop" else lambda: step(batch, 1e-3), rounds=300, warmup_rounds=30
    )
