"""Tests that memory, file descriptors and threads do not grow in a long training."""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.sources.reader import Reader
from hpctrain.shards.format import write_shards
from hpctrain.shards.storage.cache import CACHE
from tests.data.test_reader import rewrite


def own_memory():
    """Return the anonymous memory of this process in bytes; mapped files are in the page cache."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def write(folder, layout):
    random = np.random.default_rng(0)
    samples = {
        "image": random.integers(0, 255, (4000, 3, 16, 16), dtype=np.uint8),
        "token": random.integers(0, 60_000, (4000, 33), dtype=np.uint16),
        "text": [np.full(n, n, np.uint8) for n in random.integers(0, 50, 4000)],
    }
    write_shards(folder, [("train", samples)], max_bytes=2**20)
    return folder if layout is None else rewrite(folder, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "steps"), [(None, 100_000), ({"compression": "gzip"}, 5_000)], ids=["mapped", "gzip"]
)
def test_memory_and_descriptors_stay_as_they_are(tmp_path, layout, steps):
    reader = Reader(write(tmp_path, layout), "train", fields=["image", "token"])
    sampler = BlockOrder(len(reader), 0, block_size=64, window=8)
    loader = Loader(reader, global_batch_size=16, sampler=sampler, threads=2)
    feed = DevicePrefetcher(loader, torch.device("cpu"))
    before = None
    for step, batch in enumerate(feed, start=1):
        assert batch["image"].shape == (16, 3, 16, 16)
        if step == steps // 5:  # all shards have been opened by now
            before = own_memory(), len(os.listdir("/proc/self/fd"))
        if step == steps:
            break
    memory, descriptors = before
    assert own_memory() - memory < 8 * 2**20
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert CACHE.nbytes <= CACHE.max_bytes


@pytest.mark.slow
def test_iterators_that_are_left_leave_nothing(tmp_path):
    reader = Reader(write(tmp_path, None), "train")
    loader = Loader(reader, global_batch_size=16, threads=2)
    for round_ in range(300):
        for step, _ in enumerate(loader):
            if step == round_ % 7:
                break
        if round_ == 100:
            before = (
                own_memory(),
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
            )
    memory, descriptors, threads = before
    end = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > threads:  # the last threads are still ending
        assert time.monotonic() < end
        time.sleep(0.05)
    assert own_memory() - memory < 8 * 2**20
    assert len(os.listdir("/proc/self/fd")) <= descriptors
