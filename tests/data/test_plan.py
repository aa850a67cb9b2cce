"""Tests which samples and blocks the loader announces to a source before it reads them."""

import threading

import numpy as np
import pytest

from hpctrain.data.loading import prefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.shards.field import Field
from hpctrain.data.source import Source

COUNT, BLOCK, WINDOW = 6000, 10, 5  # 120 windows of 50


class Told(Source):
    """A source that records what was announced to it; its field x is the index of the sample."""

    def __init__(self):
        self.fields = {"x": Field("int64")}
        self.prepared, self.announced = [], []
        self.changed = threading.Condition()

    def __len__(self):
        return COUNT

    def prepare(self, indices):
        with self.changed:
            self.prepared += indices.tolist()
            self.changed.notify_all()

    def read_ahead(self, blocks):
        with self.changed:
            self.announced += [tuple(block) for block in blocks.tolist()]
            self.changed.notify_all()

    def _starts(self):
        return {start for start, _ in self.announced}

    def read(self, indices, out=None):
        needed = set((indices // BLOCK * BLOCK).tolist())
        with self.changed:  # the planner's thread may announce the blocks a little later
            assert self.changed.wait_for(lambda: needed <= self._starts(), 10)
        out["x"][:] = indices
        return out


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make the loader read two steps at a time."""
    monkeypatch.setattr(prefetcher, "MAX_STEPS", 2)


def test_blocks_are_announced_when_they_are_needed_and_not_long_before():
    source, sampler = Told(), BlockOrder(COUNT, 3, BLOCK, WINDOW)
    loader = Loader(
        source, global_batch_size=20, sampler=sampler, max_epochs=2, prefetch_bytes=0, threads=1
    )
    for step, batch in enumerate(loader):
        epoch, first = divmod(20 * step, COUNT)
        expected = sampler(epoch, np.arange(first, first + 20))
        assert batch["x"].tolist() == expected.tolist()
        # At most the windows of this group of two steps and of the next two groups, the rest of a
        # window that was begun, and the next window.
        most = (20 * (step + 6) // (WINDOW * BLOCK) + 3) * WINDOW
        with source.changed:
            assert len(set(source.announced)) <= most
    assert source.prepared[:COUNT] == sampler(0, np.arange(COUNT)).tolist()
    blocks = {(start, start + BLOCK) for start in range(0, COUNT, BLOCK)}
    assert set(source.announced) == blocks
