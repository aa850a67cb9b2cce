"""Measures `bench --compute-only` beside a loop that is written by hand, in turns.

python -m pytest tests/benchmarks/test_bench_pair.py -s --all

Both make the same steps on one batch in memory: of the perceptron of `experiment=digits`, whose
step is so short that every microsecond of ours is seen, and of a convolutional network, whose step
is as long as those of real trainings on a CPU. The ratio is printed and not asserted: what
hpctrain's step does besides (the check of the numbers, sums and counts, the stop request) is in it.
Both clocks are the CPU time of the one thread that computes, so that other work does not count.
"""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.composing.compose import compose
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.sections import LoopSections
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.distributed.group import process_group
from hpctrain.insight.bench.parts import Bench


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "turns", "steps"),
    [
        pytest.param([], 9, 200, id="perceptron"),
        pytest.param(["model=convnet", "train.global_batch_size=128"], 7, 20, id="convnet"),
    ],
)
def test_steps_beside_a_loop_by_hand(
    overrides: list[str],
    turns: int,
    steps: int,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    words = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}", *overrides]
    config = compose(words)
    assert config is not None
    ranks = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    rows = config.train.global_batch_size
    model = instantiate("model", config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    image, label = torch.randn(rows, 1, 8, 8), torch.randint(0, 10, (rows,))

    def by_hand() -> None:
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ratios, ours, theirs = [], [], []
    with process_group(ranks, ParallelConfig(device="cpu")) as device:
        torch.set_num_threads(1)
        for _ in range(turns):
            bench = Bench(LoopSections.of(config), ranks, device, tmp_path / "bench", steps)
            ours.append(bench.measured(["compute"])["compute"].p50_ms)
            for _ in range(10):
                by_hand()
            times = []
            for _ in range(steps):
                begin = time.thread_time()
                by_hand()
                times.append(time.thread_time() - begin)
            theirs.append(1000 * median(times))
            ratios.append(ours[-1] / theirs[-1])
    print(
        f"\nbench {median(ours):.3f} ms a step, by hand {median(theirs):.3f} ms: "
        f"{median(ratios):.2f} x, from {min(ratios):.2f} to {max(ratios):.2f}"
    )
    assert len(ratios) == turns
