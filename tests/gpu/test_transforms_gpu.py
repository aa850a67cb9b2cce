"""Batch transforms on a GPU give the results of the CPU, and the host does not wait for them."""

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.data.draws import Draws
from hpctrain.data.transforms import Compose, Normalise, RandomCrop, RandomFlip
from tests.gpu.device import on_gpu

pytestmark = on_gpu


def test_the_host_does_not_wait() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=draw, dtype=torch.uint8)
    transform = Compose([RandomCrop(32, 4), RandomFlip(), Normalise([1, 2, 3], [4, 5, 6])])
    expected = transform({"image": images}, Draws(0, 0, np.arange(64)))["image"]
    there = images.to("cuda")
    transform({"image": there}, Draws(0, 0, np.arange(64)))  # sends the mean and the std
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = transform({"image": there}, Draws(0, 0, np.arange(64)))["image"]
        torch.cuda.synchronize()
    copies = [event.key for event in profiler.key_averages() if "HtoD" in event.key]
    assert copies
    assert not any("Pageable" in name for name in copies), copies
    assert torch.equal(found.to("cpu"), expected)
