"""The device of the tests in this folder: a GPU, or the CPU in a rehearsal of them.

    HPCTRAIN_GPU_TESTS=cpu      the tests marked `on_device` run on the CPU

A rehearsal shows that a test is right as far as a CPU can show it. `first_minutes --device cpu`
makes one.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpctrain.config.schema import ParallelConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed.group import process_group
from hpctrain.engine.layers.gpu_support import can
from tests.steps import ALONE

REHEARSAL = os.environ.get("HPCTRAIN_GPU_TESTS") == "cpu"
DEVICE = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
CUDA = torch.device("cuda", 0)
needs_gpu: Any = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device"
)
# Tests of `DEVICE`. CUDA, NCCL and the compiler give warnings that depend on the machine.
on_device: list[Any] = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSAL or torch.cuda.is_available()), reason="torch sees no CUDA device"
    ),
    pytest.mark.filterwarnings("error" if REHEARSAL else "default"),
]
# Tests that only a GPU can make.
on_gpu: list[Any] = [pytest.mark.gpu, needs_gpu, pytest.mark.filterwarnings("default")]


def on_gpu_with(what: str) -> list[Any]:
    """Return the marks of tests that need a GPU with `what`, such as "tf32" or "fp8"."""
    lacks = not torch.cuda.is_available() or not can(what, CUDA)
    return [*on_gpu, pytest.mark.skipif(lacks, reason=f"there is no CUDA device with {what}")]


@pytest.fixture
def cuda_group() -> Iterator[None]:
    """A process group of one rank on the GPU."""
    with process_group(ALONE, ParallelConfig(device="cuda")):
        yield


def tokens(rows: int, length: int, vocabulary: int, device: torch.device = CUDA) -> Batch:
    """Return random tokens, the same at each call."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (rows, length + 1), generator=draw)
    return {"tokens": drawn.to(device), "mask": torch.ones(rows, device=device).bool()}
