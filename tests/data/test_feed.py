from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpctrain.data import device_prefetcher
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.transforms import Compose
from tests.data.test_loader import Numbers

CPU = torch.device("cpu")


def draw(batch, draws):
    return batch | {"drawn": draws.integers(1000)}


def drawn(batches):
    """Return the random number that each sample was given, by the sample's index."""
    return {
        int(x): int(value)
        for batch in batches
        for x, value in zip(batch["x"], batch["drawn"], strict=True)
    }


def make(rank=0, ranks=1, **options):
    loader = Loader(Numbers(100), global_batch_size=20, dp_rank=rank, dp_size=ranks, max_epochs=2)
    return DevicePrefetcher(loader, CPU, Compose([draw]), seed=5, **options)


def test_random_choices_depend_on_the_sample_and_the_epoch_alone():
    whole = list(make())
    first, second = drawn(whole[:5]), drawn(whole[5:])
    assert first.keys() == second.keys()
    assert first != second
    shares = [list(make(rank, 4)) for rank in range(4)]
    assert drawn([batch for share in shares for batch in share[:5]]) == first


def test_the_state_is_what_was_given():
    feed = make()
    before = []
    for batch in feed:
        before.append(batch)
        if len(before) == 7:
            break
    assert feed.state_dict() == {"consumed": 140}
    assert feed.epoch == 1
    assert [row for _, row in feed.samples()] == before[-1]["x"].tolist()
    resumed = make()
    resumed.load_state_dict(feed.state_dict())
    assert drawn([*before[5:], *resumed]) == drawn(list(make())[5:])
    # A new iterator continues after the batches of the training, not after the prefetched ones.
    assert [batch["x"].tolist() for batch in feed] == [b["x"].tolist() for b in list(make())[7:]]


def test_the_samples_are_those_of_this_rank_without_the_filling():
    loaders = [
        Loader(Numbers(10), global_batch_size=8, dp_rank=rank, dp_size=2, tail="pad", max_epochs=1)
        for rank in range(2)
    ]
    seen = []
    for feed in [DevicePrefetcher(loader, CPU) for loader in loaders]:
        with pytest.raises(RuntimeError, match="has not been given a batch"):
            feed.samples()
        for batch in feed:
            rows = [row for _, row in feed.samples()]
            assert rows == batch["x"][batch["mask"]].tolist()
            seen += rows
    assert sorted(seen) == list(range(10))


def test_events_of_a_gpu_are_read_though_nobody_asks():
    """A stub stands for CUDA's events: the last ten steps are not over."""
    feed = make()
    for step in range(400):
        event = SimpleNamespace(query=lambda n=step: n < 390, elapsed_time=lambda _: 10.0)
        feed._waits.append((event, event))
        feed._read_waits(device_prefetcher._PENDING)
        assert len(feed._waits) <= device_prefetcher._PENDING
    waits = feed.wait_s - feed.loader.wait_s
    assert waits == pytest.approx(3.9)
    assert len(feed._waits) == 10


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    device = torch.device("cuda")
    loader = Loader(Numbers(100), global_batch_size=20, max_epochs=2, pin_memory=True)
    feed = DevicePrefetcher(loader, device, Compose([draw]), seed=5, ahead_bytes=400)
    there = []
    for step, batch in enumerate(feed, start=1):
        assert batch["x"].is_cuda
        assert feed.state_dict()["consumed"] == 20 * step
        assert [row for _, row in feed.samples()] == batch["x"].tolist()
        there.append({name: value.cpu() for name, value in batch.items()})
        torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    assert drawn(there[:5]) == drawn(list(make())[:5])
    assert len(there) == 10
    assert feed.wait_s >= 0
    assert np.isfinite(feed.wait_s)


@pytest.mark.gpu
def test_copies_are_over_when_the_iterator_has_been_left():
    """Otherwise the loader would fill pinned buffers that are still being copied."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    loader = Loader(Numbers(100), global_batch_size=20, max_epochs=2, pin_memory=True)
    streams = []

    def slow(batch, draws):
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(500_000_000)  # cycles; the next batch is copied after them
        return batch

    batches = iter(DevicePrefetcher(loader, torch.device("cuda"), slow))
    next(batches)
    batches.close()
    assert streams[0].query()
