"""What a step sees is what the files hold, also when copies, transforms and steps are slow.

A batch travels through a pinned buffer and over a stream beside that of the training. If one of
them went on too early, a checksum would be that of another batch.
"""

from pathlib import Path

import h5py
import pytest
import torch

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.draws import Draws
from hpctrain.data.loading.loader import Loader
from hpctrain.data.shards.types import Batch
from hpctrain.data.sources.reader import Reader
from tests.gpu.device import DEVICE, REHEARSAL, on_device

pytestmark = on_device
SIZE, EPOCHS = 64, 3


def sleep(cycles: int) -> None:
    """Let the current stream do nothing for a while."""
    if not REHEARSAL:
        torch.cuda._sleep(cycles)


def checksums(batch: Batch) -> torch.Tensor:
    """Return a number for each sample that depends on every pixel, its place and the label."""
    pixels = batch["image"].flatten(1).long()
    places = torch.arange(1, pixels.shape[1] + 1, device=pixels.device)
    return (pixels * places).sum(1) * 16 + batch["label"].long()


@pytest.mark.parametrize("slow", ["side stream", "training", "both"])
@pytest.mark.parametrize("ahead_bytes", [1, 2**16])
def test_the_values_of_a_step_are_those_of_the_file(
    digits: Path, slow: str, ahead_bytes: int
) -> None:
    def transform(batch: Batch, draws: Draws) -> Batch:
        if slow != "training":
            sleep(20_000_000)
        return batch | {"image": batch["image"] + 0}  # new memory of the side stream

    loader = Loader(
        Reader(digits, "train"), global_batch_size=SIZE, max_epochs=EPOCHS, pin_memory=True
    )
    feed = DevicePrefetcher(loader, DEVICE, transform, ahead_bytes=ahead_bytes)
    seen, wanted = [], []
    for batch in feed:
        if slow != "side stream":
            sleep(20_000_000)
        seen.append(checksums(batch))
        wanted.append(feed.last)
        del batch  # the memory may be used again as soon as the step is over
    samples = [sample for step in wanted for sample in feed.samples(step)]
    feed.close()
    stored = {}
    for path in {path for path, _ in samples}:
        with h5py.File(path) as file:  # without our own readers
            whole = {name: torch.from_numpy(file[name][:]) for name in ("image", "label")}
        stored |= {(path, row): value for row, value in enumerate(checksums(whole).tolist())}
    expected = [stored[path, row] for path, row in samples]
    assert torch.cat(seen).tolist() == expected
    assert len(expected) == len(seen) * SIZE
    assert len(set(expected)) > 1000
