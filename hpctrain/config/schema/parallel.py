"""The keys of `parallel`, `precision` and `network`: how ranks share the work, in which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key, section

# The name of a schedule, and the stages that each rank has.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "interleaved_zb": 2}
STYLES = (
    *("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output"),
    *("sequence_parallel", "gather_sequence"),
)


def _check_degree(degree: int) -> str:
    return "" if degree == -1 or 1 <= degree < 2**31 else "it must be at least 1, or -1"


def _check_weights(weights: Any) -> str:
    if weights is None:
        return ""
    if isinstance(weights, str) and weights.startswith("auto"):
        return "auto has left hpctrain: give a number for each node"
    numbers = weights if isinstance(weights, list | tuple) else ()
    if numbers and all(type(weight) is int and 1 <= weight <= 1000 for weight in numbers):
        return ""
    return "it must be a number from 1 to 1000 for each node, such as [2, 1]"


@dataclass
class _DDPConfig:
    """Options of torch's DistributedDataParallel, which dp_replicate uses when dp_shard is 1."""

    bucket_mb: float = key(
        25.0, "Gradients are reduced in buckets of this size.", unit="MB", above=0
    )
    find_unused_parameters: bool = key(
        False, "A step may leave out parameters of the model. Finding them takes time."
    )


@dataclass
class FSDPConfig:
    """Options of torch's FSDP2 (`fully_shard`), which divides what dp_shard divides."""

    reshard_after_forward: int | None = key(
        None,
        "With zero=3, parameters stay divided over this many ranks between forward and backward, "
        "a factor of dp_shard. Null means over all of them.",
        unit="ranks",
        at_least=2,
    )
    offload: bool = key(
        False,
        "Parameters, gradients and optimizer state stay in the memory of the host, and the "
        "optimizer runs there.",
    )
    agree: bool = key(
        False,
        "Before each block the ranks agree which one is next, by a reduction of one number, for "
        "models that call their blocks in an order that depends on the data. Without it they agree "
        "in the first step only; a rank may skip blocks then, but not call others.",
    )


@dataclass
class PipelineConfig:
    """How pp divides the layers, and in which order a rank works on its micro-batches."""

    schedule: str = key(
        "1f1b",
        "gpipe makes all forward passes first. 1f1b alternates, which keeps fewer activations. "
        "interleaved gives each rank several stages, which makes the bubble smaller. zbv and "
        "interleaved_zb (zero bubble) also split the backward pass.",
        choices=tuple(SCHEDULES),
    )
    blocks: list[int] | None = key(
        None,
        "Each stage has this many of the model's blocks, from the first stage to the last. Null "
        "divides them by their cost.",
        unit="blocks",
    )


@dataclass
class ParallelConfig:
    """How the model is spread over the ranks: the product of the degrees is their number."""

    dp_replicate: int = key(
        -1,
        "There are this many replicas of the model, whose gradients are averaged. -1 means what "
        "the other degrees leave. One degree may be -1.",
        unit="replicas",
        check=_check_degree,
    )
    dp_shard: int = key(
        1,
        "Each replica is divided over this many ranks. -1 means what the other degrees leave.",
        unit="ranks",
        check=_check_degree,
    )
    cp: int = key(
        1,
        "Each sequence is divided over this many ranks (context parallel), for long sequences. "
        "The number of positions must be a multiple of 2 * cp.",
        unit="ranks",
        check=_check_degree,
    )
    tp: int = key(
        1,
        "Each layer is divided over this many ranks (tensor parallel), which communicate in every "
        "layer and should be on one node.",
        unit="ranks",
        check=_check_degree,
    )
    pp: int = key(
        1,
        "The layers are divided over this many ranks (pipeline parallel). The micro-batches of "
        "train.accumulate pass through them one after the other.",
        unit="ranks",
        check=_check_degree,
    )
    ep: int = key(
        1,
        "The experts of a layer are divided over this many of the data-parallel ranks (expert "
        "parallel), a factor of dp_shard, or of dp_replicate if dp_shard is 1.",
        count="ranks",
    )
    weights: Any = key(
        None,
        "For nodes of different speed: the ranks of each node get shares of the global batch in "
        "proportion to these numbers, one per node in the order of the ranks. A rank of weight 2 "
        "makes two micro-batches where one of weight 1 makes one. It works with whole replicas "
        "(DDP) and with zero=1. Null means equal shares.",
        check=_check_weights,
    )
    zero: int = key(
        3,
        "dp_shard divides the optimizer state (1), the gradients too (2), and the parameters too "
        "(3), as the stages of ZeRO.",
        choices=(1, 2, 3),
    )
    sync: str = key(
        "auto",
        "Gradients are reduced over the ranks after every micro-batch (every) or only after the "
        "last one (last), which needs the memory of undivided gradients. auto takes every for "
        "zero=2 and 3, otherwise last.",
        choices=("auto", "every", "last"),
    )
    blocks: list[str] = key(
        [],
        "Modules of these classes are the blocks that are sharded, checkpointed and compiled one "
        "by one. Empty means the longest list of modules of one class in the model.",
    )
    plan: dict[str, str] = key(
        {},
        "How tensor parallel divides modules: a pattern of module names, such as layers.*.mlp.up, "
        "and the style colwise, rowwise, embedding_rowwise, colwise_gather_output, "
        "sequence_parallel or gather_sequence. Empty means the plan that the model carries.",
        choices=STYLES,
    )
    sequence_parallel: bool = key(
        True,
        "Where the plan allows it, tensor parallel divides the sequence outside of attention and "
        "MLP, which saves memory.",
    )
    loss_parallel: bool = key(
        True, "Tensor parallel computes the loss from logits that stay divided by the vocabulary."
    )
    pipeline: PipelineConfig = section(PipelineConfig)
    ddp: _DDPConfig = section(_DDPConfig)
    fsdp: FSDPConfig = section(FSDPConfig)
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
    timeout_s: int = key(600, "A collective operation fails after this time.", count="seconds")


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


@dataclass
class NetworkConfig:
    """How the ranks communicate. A variable that you have exported has precedence over its key."""

    interface: str | None = key(
        None,
        "NCCL and gloo connect through this network interface, such as ib0 (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME). Null leaves the choice to them. Before, the ranks meet at "
        "MASTER_ADDR, by default the name of the first host.",
        pattern=(
            r"[\w.:@-]+(,[\w.:@-]+)*",
            "a name such as ib0, or several with commas between them",
        ),
    )
    infiniband: str = key(
        "auto",
        "NCCL uses the InfiniBand devices that it finds (auto), no InfiniBand (none: "
        "NCCL_IB_DISABLE=1), exactly these devices, such as mlx5_0,mlx5_1, or all but these, such "
        "as ^mlx5_3 (NCCL_IB_HCA).",
        pattern=(
            r"\^?=?[\w.:-]+(,[\w.:-]+)*",
            "auto, none, or devices such as mlx5_0,mlx5_1 or ^mlx5_3",
        ),
    )
    debug: str | None = key(
        None,
        "NCCL prints this much about its work (NCCL_DEBUG). Null prints nothing.",
        choices=(None, "VERSION", "WARN", "INFO", "TRACE"),
    )
