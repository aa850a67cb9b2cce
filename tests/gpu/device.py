"""The device of the tests in this folder: a GPU, or the CPU in a rehearsal of them.

    HPCTRAIN_GPU_TESTS=cpu      the tests marked `on_device` run on the CPU

A rehearsal shows that a test is right as far as a CPU can show it. `first_minutes --device cpu`
makes one.
"""

import os
from typing import Any

import pytest
import torch

REHEARSAL = os.environ.get("HPCTRAIN_GPU_TESTS") == "cpu"
DEVICE = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
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
