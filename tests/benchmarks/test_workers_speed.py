"""Compares hpctrain's worker processes with torch's DataLoader for the same Python transform.

python -m pytest tests/benchmarks/test_workers_speed.py --benchmark-only

The samples, uint8 (3, 64, 64), come from one file that both map. Batches have 64 samples, and there
are 2 workers. The loops take turns, so that other load on the machine affects all of them alike.
`extra_info` has the best rate of each in samples per second, and `ratio`, our best rate divided by
torch's.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.samples import Sample
from hpctrain.shards.field import Field
from hpctrain.shards.types import Array, Int64s

COUNT, SHAPE, BATCH, WORKERS = 4_096, (3, 64, 64), 64, 2
ROUNDS = 4


class Augment:
    """A flip and a crop (about 15 us), and `passes` times a jitter of the colours (12 us each)."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __call__(self, sample: Sample, random: np.random.Generator) -> Sample:
        image = sample["image"]
        if random.random() < 0.5:
            image = image[:, :, ::-1]
        padded = np.zeros((3, 72, 72), np.float32)
        padded[:, 4:68, 4:68] = image
        top, left = random.integers(0, 9, 2)
        image = padded[:, top : top + 64, left : left + 64]
        for _ in range(self.passes):
            image = np.clip(image * np.float32(random.uniform(0.8, 1.2)), 0, 255)
        return {"image": image.astype(np.uint8), "label": sample["label"]}


class Mapped:
    """The source of hpctrain's workers, which maps the file."""

    fields: Mapping[str, Field] = {"image": Field("uint8", SHAPE), "label": Field("int64")}

    def __init__(self, path: Path) -> None:
        self.images = np.memmap(path, np.uint8, "r", shape=(COUNT, *SHAPE))
        self.labels = np.arange(COUNT)

    def read(self, indices: Int64s, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        out = out or {}
        return {
            "image": np.take(self.images, indices, axis=0, out=out.get("image"), mode="clip"),
            "label": self.labels[indices],
        }


class Items(Dataset[Sample]):
    """The same samples and transform for torch's DataLoader."""

    def __init__(self, path: Path, transform: Augment) -> None:
        self.source, self.transform = Mapped(path), transform
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Sample:
        sample = {"image": self.source.images[index], "label": self.source.labels[index]}
        return self.transform(sample, self.random)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "images.bin"
    np.random.default_rng(0).integers(0, 255, (COUNT, *SHAPE), dtype=np.uint8).tofile(path)
    return path


def epoch(workers: Workers, batches: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of one shuffled epoch, submitting `batches` of them together."""
    order = np.random.default_rng(0).permutation(COUNT)
    starts = iter(range(0, COUNT, BATCH * batches))
    ahead: deque[Any] = deque()
    while True:
        while len(ahead) < 3 * WORKERS and (start := next(starts, None)) is not None:
            positions = np.arange(start, min(COUNT, start + BATCH * batches))
            ahead.append(workers.submit((0, 0), positions, order[positions]))
        if not ahead:
            return
        rows = ahead.popleft().result()
        for start in range(0, len(rows["label"]), BATCH):
            part = slice(start, start + BATCH)
            yield {name: torch.from_numpy(array[part]) for name, array in rows.items()}


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_workers(benchmark: Any, path: Path, passes: int) -> None:
    transform = Augment(passes)

    def theirs(prefetch: int) -> Callable[[], Any]:
        loader = DataLoader(
            Items(path, transform),
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            prefetch_factor=prefetch,
        )
        return lambda: deque(loader, maxlen=0)

    with Workers(Mapped(path), transform, WORKERS) as workers:
        loops = {
            "torch, prefetch 2": theirs(2),
            "torch, prefetch 4": theirs(4),
            "ours": lambda: deque(epoch(workers, 1), maxlen=0),
            "ours, 4 together": lambda: deque(epoch(workers, 4), maxlen=0),
        }
        best = dict.fromkeys(loops, 0.0)
        for loop in loops.values():
            loop()
        for _ in range(ROUNDS):
            for name, loop in loops.items():
                start = time.perf_counter()
                loop()
                best[name] = max(best[name], COUNT / (time.perf_counter() - start))
        items = Items(path, transform)
        start = time.perf_counter()
        for i in range(2000):
            items[i]
        benchmark.extra_info["transform us"] = (time.perf_counter() - start) / 2000 * 1e6
        benchmark.extra_info |= best
        benchmark.extra_info["ratio"] = max(list(best.values())[2:]) / max(list(best.values())[:2])
        benchmark.pedantic(loops["ours"], rounds=1)
    print(*(f"{name} {value:.4g}" for name, value in benchmark.extra_info.items()), sep="\n")
