"""Compressed chunks: h5py's own reading of a file beside ours, in one run.

    h5py, batches   random batches by fancy index: a shuffled epoch read as most people do
    h5py, chunks    whole chunks one after another, not shuffled: the best that h5py can do
    ours            block shuffle: batches from windows of a few chunks in random order, the
                    next window prefetched; with 1 thread (no pool) and with 2

Samples, bytes and files are the same; files are in the page cache. Prints MB/s, the best of ROUNDS,
and ours with 2 threads over each of h5py's.

python -m pytest tests/benchmarks/test_chunks.py --benchmark-only -s
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.data.chunkcache import ChunkCache
from hpctrain.data.chunks import Chunked

ROUNDS = 7
WINDOW = 4  # chunks
CODECS = {
    "gzip": {"compression": "gzip", "shuffle": True},
    "lz4": {"shuffle": True, **hdf5plugin.LZ4()},
    "zstd": {"shuffle": True, **hdf5plugin.Zstd()},
    "blosc-lz4": dict(hdf5plugin.Blosc(cname="lz4")),
    "blosc2-lz4": dict(hdf5plugin.Blosc2(cname="lz4")),
    "blosc2-zstd": dict(hdf5plugin.Blosc2(cname="zstd")),
}


def images() -> np.ndarray:
    """Smooth, (4096, 3, 64, 64), as photographs are."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:64, :64].astype(np.float32)
    a, b, c, d = rng.normal(size=(4, 4096, 3, 1, 1)).astype(np.float32)
    return (40 * (a * np.sin(x / 9 + b) + c * np.cos(y / 7 + d)) + 128).clip(0, 255).astype("u1")


def tokens() -> np.ndarray:
    """(16384, 1025), as frequent as words are."""
    return np.random.default_rng(0).zipf(1.2, (16384, 1025)).clip(0, 50_000).astype("u2")


def fields() -> np.ndarray:
    """A random walk in two dimensions, (32, 8, 256, 256), as weather is."""
    steps = np.random.default_rng(0).normal(size=(32, 8, 256, 256)).astype("f4")
    return np.cumsum(np.cumsum(steps, axis=-1), axis=-2)


DATA = {"images": (images, 256, 64), "tokens": (tokens, 1024, 16), "fields": (fields, 4, 4)}


@pytest.fixture(scope="module", params=DATA)
def samples(request: pytest.FixtureRequest) -> tuple[str, np.ndarray, int, int]:
    make, chunk, batch = DATA[request.param]
    return request.param, make(), chunk, batch


@pytest.mark.parametrize("codec", CODECS)
def test_chunks(
    benchmark: Any, tmp_path: Path, samples: tuple[str, np.ndarray, int, int], codec: str
) -> None:
    name, data, chunk, batch = samples
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        shape = (chunk, *data.shape[1:])
        file.create_dataset("x", data=data, chunks=shape, **CODECS[codec])
    pool = ThreadPoolExecutor(2)
    file = h5py.File(path, "r")
    few = np.random.default_rng(1).permutation(len(data))[: 2 * batch].reshape(-1, batch)
    ways: dict[str, tuple[Callable[[], Iterator[np.ndarray]], int]] = {
        "h5py, batches": (lambda: (file["x"][np.sort(rows)] for rows in few), few.size),
        "h5py, chunks": (lambda: in_chunks(file["x"]), len(data)),
        "ours, 1 thread": (lambda: in_blocks(file["x"], path, batch, None), len(data)),
        "ours, 2 threads": (lambda: in_blocks(file["x"], path, batch, pool), len(data)),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way, (run, _) in ways.items():
            start = time.perf_counter()
            for _ in run():
                pass
            best[way] = min(best[way], time.perf_counter() - start)
    speed = {way: count * data[0].nbytes / best[way] / 1e6 for way, (_, count) in ways.items()}
    ours = speed["ours, 2 threads"]
    ratios = {way: ours / value for way, value in speed.items()}
    benchmark.extra_info |= {"MB/s": speed, "ours, 2 threads, over": ratios}
    print(
        f"\n{name:7}{codec:12} {data.nbytes / path.stat().st_size:5.2f}:1  "
        + "  ".join(f"{way} {value:6.0f}" for way, value in speed.items())
        + f"  x{ratios['h5py, batches']:.1f}, x{ratios['h5py, chunks']:.2f}"
    )
    benchmark.pedantic(lambda: list(map(len, ways["ours, 2 threads"][0]())), rounds=3)
    pool.shutdown()
    file.close()


def in_chunks(dataset: h5py.Dataset) -> Iterator[np.ndarray]:
    for start in range(0, len(dataset), dataset.chunks[0]):
        yield dataset[start : start + dataset.chunks[0]]


def in_blocks(
    dataset: h5py.Dataset, path: Path, batch: int, pool: Executor | None
) -> Iterator[np.ndarray]:
    window = WINDOW * dataset.chunks[0]
    cache = ChunkCache(5 * window * dataset[0].nbytes)  # this window, and the next
    chunked = Chunked(dataset, path, pool=pool, cache=cache)
    rng = np.random.default_rng(0)
    starts = np.arange(0, len(dataset), window)
    for i, start in enumerate(starts):
        for ahead in starts[i : i + 2]:
            chunked.prefetch(np.arange(ahead, min(ahead + window, len(dataset))))
        rows = start + rng.permutation(min(window, len(dataset) - start))
        for at in range(0, len(rows), batch):
            yield chunked.rows(rows[at : at + batch])
    assert cache.decoded == -(-len(dataset) // chunked.chunk_rows)
