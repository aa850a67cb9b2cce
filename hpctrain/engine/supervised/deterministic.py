"""Deterministic algorithms: a run that is repeated gives the same bits.

    with deterministic(device):
        ...   # operations add in a fixed order, or raise an error

The variables that CUDA reads at its start are those of `hpctrain.config.rules.job`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.job import CUBLAS_WORKSPACES


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let torch use deterministic algorithms only; afterwards its settings are as before.

    Attention needs nothing more: the backward passes of torch's flash and memory-efficient kernels
    obey the same setting, and cuDNN's attention is not chosen. Raises a ConfigError if
    CUBLAS_WORKSPACE_CONFIG was exported with a value that torch refuses.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    if device.type == "cuda" and os.environ.get(name) not in CUBLAS_WORKSPACES:
        raise ConfigError(
            f"train.deterministic=true: {name}={os.environ.get(name, 'unset')!r} is not one of "
            f"{', '.join(CUBLAS_WORKSPACES)}: unset it before the run"
        )
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
