"""Measures `bench --compute-only` beside a loop that is written by hand, in turns.

python -m pytest tests/benchmarks/test_bench_pair.py -s --all

Both make the same steps of the perceptron of `experiment=digits` on one batch in memory. The ratio
is printed and not asserted: what hpctrain's step does besides (the check of the numbers, sums and
counts, the stop request) is in it.
"""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from hpctrain.bench.parts import Bench
from hpctrain.config.composing.compose import compose
from hpctrain.config.schema import ParallelConfig
from hpctrain.distributed.group import process_group
from hpctrain.distributed.ranks import RankInfo
from hpctrain.models import MLP

TURNS, STEPS = 15, 200


@pytest.mark.slow
def test_steps_beside_a_loop_by_hand(digits: Path, tmp_path: Path) -> None:
    config = compose(["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}"])
    assert config is not None
    ranks = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    rows = config.train.global_batch_size
    model = MLP(*(config.model[name] for name in ("in_features", "hidden", "out_features")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    image, label = torch.randn(rows, 64), torch.randint(0, 10, (rows,))

    def by_hand() -> None:
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ratios, ours = [], []
    with process_group(ranks, ParallelConfig(device="cpu")) as device:
        torch.set_num_threads(1)
        for _ in range(TURNS):
            bench = Bench(config, ranks, device, tmp_path / "bench", warm_up=20, steps=STEPS)
            ours.append(bench.measured(["compute"])["compute"].p50_ms)
            for _ in range(20):
                by_hand()
            times = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                by_hand()
                times.append(time.perf_counter() - begin)
            ratios.append(ours[-1] / (1000 * median(times)))
    print(f"\nbench {median(ours):.3f} ms a step, {median(ratios):.2f} x a loop by hand")
    assert len(ratios) == TURNS
