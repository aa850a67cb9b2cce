"""The keys of `precision`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class PrecisionConfig:
    """The number formats of the computation, the parameters and the gradient reduction."""

    compute: str = key(
        "fp32",
        "Matrix products are computed in this format. bf16 and fp16 are torch's autocast, and fp16 "
        "scales the loss. tf32 needs a GPU of compute capability 8.0, fp8 one of 8.9 and torchao. "
        "fp64 is torch's default dtype in the whole run, and needs params=fp64.",
        choices=("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"),
    )
    params: str = key(
        "fp32",
        "Parameters, their gradients and the optimizer state are stored in this format.",
        choices=("fp64", "fp32", "bf16"),
    )
    reduce: str | None = key(
        None,
        "Gradients are added over the ranks in this format. Null means the format of the "
        "parameters.",
        choices=(None, "fp32", "bf16", "fp16"),
    )
