"""Measures the device prefetcher: its rate beside pinned copies, and how long a ResNet-50 waits.

python -m pytest tests/benchmarks/test_feed_speed.py --benchmark-only        (needs CUDA)
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.sources.reader import Reader
from hpctrain.data.transforms import Normalise, bind
from hpctrain.shards.format import write_shards
from hpctrain.shards.index import Index

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BATCH, SHAPE, COUNT = 256, (3, 224, 224), 4096


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)

    def batches() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        for start in range(0, COUNT, BATCH):
            image = random.integers(0, 255, (BATCH, *SHAPE), dtype=np.uint8)
            yield "train", {"image": image, "label": np.arange(start, start + BATCH) % 1000}

    write_shards(folder, batches())
    return folder


def make(folder: Path, threads: int) -> DevicePrefetcher:
    loader = Loader(
        Reader(folder, "train"), global_batch_size=BATCH, threads=threads, pin_memory=True
    )
    statistics = Index.load(folder).statistics["train"]
    return DevicePrefetcher(loader, torch.device("cuda"), bind(Normalise(), statistics))


def rate(feed: Iterator[object], batches: int) -> float:
    """Return the rate at which `feed` gives images, in bytes per second."""
    for _ in islice(feed, 16):  # the first batches make the buffers and fill the page cache
        pass
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in islice(feed, batches):
        pass
    torch.cuda.synchronize()
    return batches * BATCH * int(np.prod(SHAPE)) / (time.perf_counter() - start)


def copies() -> Iterator[torch.Tensor]:
    """Copy one pinned buffer to the GPU again and again, which is the highest rate possible."""
    host = torch.empty((BATCH, *SHAPE), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    while True:
        yield there.copy_(host, non_blocking=True)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_delivered_and_normalised_at_the_rate_of_copies(
    benchmark: BenchmarkFixture, images: Path, threads: int
) -> None:
    feed = iter(make(images, threads))
    ours, limit = [], []

    def measure() -> None:
        limit.append(rate(copies(), 64))
        ours.append(rate(feed, 64))

    benchmark.pedantic(measure, rounds=5)
    ratio = float(np.median(np.array(ours) / np.array(limit)))
    benchmark.extra_info |= {"ratio": ratio, "GB/s": max(ours) / 1e9, "copies": max(limit) / 1e9}
    print(f"\n{threads} threads: {max(ours) / 1e9:.1f} GB/s, {ratio:.2f} of pinned copies")


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al., "Deep residual learning for image recognition", 2016)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = width_in == out and stride == 1
        shortcut = (nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 * 2**stage
            layers.append(Bottleneck(width_in, width, 2 if stage and not block else 1))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))


def test_a_resnet_50_hardly_waits(benchmark: BenchmarkFixture, images: Path) -> None:
    feed = make(images, threads=2)
    batches = iter(feed)
    model = resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fractions = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            image = batch["image"].to(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(model(image), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in islice(batches, 10):
        step(batch)

    def measure() -> None:
        torch.cuda.synchronize()
        start, waited = time.perf_counter(), feed.wait_s
        for batch in islice(batches, 50):
            step(batch)
        torch.cuda.synchronize()
        fractions.append((feed.wait_s - waited) / (time.perf_counter() - start))

    benchmark.pedantic(measure, rounds=3)
    benchmark.extra_info["data wait"] = max(fractions)
    print(f"\ndata wait {max(fractions):.2%} of the time")
