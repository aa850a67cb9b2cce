"""Measures the positions per second of every sampler, and how well block shuffle mixes samples.

python -m pytest tests/benchmarks/test_order_speed.py --benchmark-only -s
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpctrain.data.samplers.block_order import BlockOrder, Lanes
from hpctrain.data.samplers.buckets import Buckets
from hpctrain.data.samplers.mixture import Mixture
from hpctrain.data.samplers.order import Order, Repeat, Sampler
from hpctrain.data.samplers.subset import Subset
from hpctrain.data.samplers.weighted import Balanced, Weighted

COUNT = 10**10
MILLION = np.arange(10**6)

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "full": lambda: Order(COUNT, 0),
    "full, 2^34 + 1": lambda: Order(2**34 + 1, 0),
    "full, 2^33": lambda: Order(2**33, 0),
    "blocks": lambda: BlockOrder(COUNT, 0, 1024, 64),
    "blocks, small": lambda: BlockOrder(COUNT, 0, 16, 64),
    "lanes": lambda: Lanes(BlockOrder(COUNT, 0, 1024, 64), 64, 64),
    "repeat": lambda: Repeat(Order(10**6, 0), 3),
    "subset": lambda: Subset(Order(10**6, 0), MILLION * 7, of=10**7),
    "weighted": lambda: Weighted(MILLION % 7, 0),
    "balanced, 10": lambda: Balanced(MILLION * 7919 % 10, 0),
    "balanced, 1000": lambda: Balanced(MILLION * 7919 % 1000, 0),
    "mixture": lambda: Mixture({"a": COUNT, "b": 10**8, "c": 10**7}),
    "buckets": lambda: Buckets(Order(10**6, 0), (MILLION % 997).__getitem__, 6400, 64),
}


@pytest.mark.parametrize("calls_of", [65_536, 4096, 64])
@pytest.mark.parametrize("name", SAMPLERS)
def test_positions(benchmark: Any, name: str, calls_of: int) -> None:
    sampler = SAMPLERS[name]()
    calls = max(1, 65_536 // calls_of)
    starts = iter(range(0, 10**12, calls * calls_of))

    def read() -> None:  # continues through the epoch, as a loader does
        start = next(starts)
        for i in range(calls):
            positions = np.arange(start + i * calls_of, start + (i + 1) * calls_of)
            sampler(0, positions % sampler.count)

    benchmark.pedantic(read, rounds=20, warmup_rounds=2)
    rate = calls * calls_of / benchmark.stats.stats.min / 1e6
    benchmark.extra_info["million positions/s"] = rate
    print(f"\n{name:16} {calls_of:6} positions a call: {rate:8.2f} million positions/s")


@pytest.mark.parametrize("name", ["full", "blocks", "lanes", "mixture"])
def test_epoch_start(benchmark: Any, name: str) -> None:
    sampler = SAMPLERS[name]()
    epochs = iter(range(10**9))
    positions = np.arange(4096)
    benchmark.pedantic(lambda: sampler(next(epochs), positions), rounds=50, warmup_rounds=2)


QUALITY: dict[str, Callable[[int], Sampler]] = {
    "none": lambda count: Order(count, 0, shuffle=False),
    "blocks 100 x 10": lambda count: BlockOrder(count, 0, 100, 10),
    "blocks 100 x 100": lambda count: BlockOrder(count, 0, 100, 100),
    "blocks 100 x 1000": lambda count: BlockOrder(count, 0, 100, 1000),
    "blocks 10 x 1000": lambda count: BlockOrder(count, 0, 10, 1000),
    "the same, 16 lanes": lambda count: Lanes(BlockOrder(count, 0, 10, 1000), 16, 16),
    "full": lambda count: Order(count, 0),
}


@pytest.mark.parametrize("name", QUALITY)
def test_quality(benchmark: Any, name: str) -> None:
    """Measure how well a million samples, sorted by 100 classes, are mixed in batches of 256.

    The numbers are means over the batches.

    imbalance   chi-square of the classes in a batch, per degree of freedom: 1 for random batches
    neighbours  fraction of the samples of a batch, sorted by index, that are neighbours on disk
    together    how often two samples of a batch are in one batch again in the next epoch, divided
                by that number for random batches
    distance    distance between the indices of two successive samples, divided by that of a random
                order
    """
    count, classes, batch = 10**6, 100, 256
    sampler = QUALITY[name](count)
    first = benchmark.pedantic(lambda: sampler(0, np.arange(count)), rounds=1)
    batches = first[: count // batch * batch].reshape(-1, batch)
    labels = batches * classes // count
    held = np.zeros((len(batches), classes))
    np.add.at(held, (np.arange(len(batches))[:, None], labels), 1)
    expected = batch / classes
    place = np.empty(count, np.int64)
    place[sampler(1, np.arange(count))] = np.arange(count) // batch
    again = np.sort(place[batches], axis=1)
    measures = {
        "imbalance": ((held - expected) ** 2).sum() / expected / (classes - 1) / len(batches),
        "neighbours": float((np.diff(np.sort(batches, axis=1), axis=1) == 1).mean()),
        "together": (np.diff(again, axis=1) == 0).mean() * 2 * count / batch**2,
        "distance": np.abs(np.diff(first)).mean() / (count / 3),
    }
    benchmark.extra_info.update(measures)
    told = "  ".join(f"{key} {value:8.4f}" for key, value in measures.items())
    print(f"\n{name:20} {told}")
