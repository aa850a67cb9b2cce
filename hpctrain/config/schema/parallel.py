"""The keys of `parallel`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class ParallelConfig:
    """Degrees of parallelism: their product is the number of ranks."""

    dp: int = key(-1, "This many ranks are data parallel. -1 means all of them.", unit="ranks")
    device: str = key(
        "auto",
        "The model is trained on this kind of device. auto takes the GPUs if there are any.",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = key(
        "auto",
        "The ranks communicate through this library. auto takes nccl for GPUs and gloo for CPUs.",
        choices=("auto", "gloo", "nccl"),
    )
    timeout_s: int = key(
        600, "A collective operation fails after this time.", unit="seconds", at_least=1
    )
