"""Which ways of spreading a model over ranks, precisions and trainings go together.

What torch cannot do is refused here, before a job is submitted: some of it fails late, and some of
it would train wrongly without an error. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.rules import pipeline_schedule
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.division import ep_problems
from hpctrain.config.schema import Config


def parallel_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit together in `parallel`, `precision` and `train`."""
    parallel, train, precision = config.parallel, config.train, config.precision
    sharded = degrees.dp_shard > 1 or parallel.fsdp.offload
    parts = BatchSizes.of(config, degrees).accumulate
    if parallel.ddp.static_graph and (parts > 1 or train.micro_batch_size == "auto"):
        yield "parallel.ddp.static_graph=true with several micro-batches: torch cannot have both"
    kept = parallel.fsdp.reshard_after_forward
    if kept is not None:
        if parallel.zero != 3:
            yield (
                f"parallel.fsdp.reshard_after_forward={kept} divides parameters, which "
                f"parallel.zero={parallel.zero} does not"
            )
        elif degrees.dp_shard % kept:
            factors = [n for n in range(2, degrees.dp_shard + 1) if degrees.dp_shard % n == 0]
            yield (
                f"parallel.fsdp.reshard_after_forward={kept}: it must be a factor of dp_shard "
                f"{degrees.dp_shard}: null" + "".join(f", {n}" for n in factors)
            )
    if sharded and parallel.zero == 1 and parallel.sync == "every":
        yield "parallel.sync=every with parallel.zero=1 is parallel.zero=2"
    yield from _replicas(config, degrees)
    yield from _tensor(config, degrees)
    yield from ep_problems(degrees, parallel.ep)
    yield from pipeline_schedule.problems(config, degrees)
    yield from _context(config, degrees)
    if train.sync_batchnorm:
        yield from sync_problems(config, degrees)
    if precision.params == "bf16" and precision.compute != "bf16":
        yield (
            f"precision.params=bf16 with precision.compute={precision.compute}: numbers in the "
            "batch would not have the format of the parameters; use precision=pure_bf16, which "
            "computes in bf16, or precision.params=fp32"
        )
    if parallel.device == "cpu" and precision.compute in ("tf32", "fp8"):
        yield f"precision.compute={precision.compute} with parallel.device=cpu: it needs a GPU"
    if parallel.device == "cpu" and parallel.backend == "nccl":
        yield "parallel.backend=nccl with parallel.device=cpu: use gloo or auto"


def sync_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield why `train.sync_batchnorm=true` is impossible."""
    parallel, local = config.parallel, config.train.local_sgd
    key = "train.sync_batchnorm=true with"
    if degrees.pp > 1:
        yield f"{key} parallel.pp={degrees.pp}: each of its micro-batches has its own statistics"
    if parallel.weights is not None:
        yield f"{key} parallel.weights={parallel.weights}: nodes make different numbers of passes"
    if local.every is not None:
        yield f"{key} train.local_sgd.every={local.every}: replicas train by themselves"


def _tensor(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit tensor parallel."""
    parallel, compiled = config.parallel, config.train.compile
    if parallel.async_tp and degrees.tp == 1:
        yield "parallel.async_tp=true with tp 1: there is no communication that could overlap"
    elif parallel.async_tp and compiled == "off":
        yield "parallel.async_tp=true with train.compile=off: the compiler does it; use blocks"
    if degrees.tp > 1 and parallel.device == "cpu" and compiled != "off":
        yield f"train.compile={compiled} with tp {degrees.tp} on CPUs: torch fails; use off"
    if degrees.tp > 1 and config.precision.compute == "fp8":
        yield f"precision.compute=fp8 with tp {degrees.tp}: use bf16, or tp 1"
    if parallel.ddp.static_graph and degrees.ranks != degrees.dp_replicate:
        yield f"parallel.ddp.static_graph=true with {degrees}: it is an option of DDP"
    if parallel.ep > 1 and config.train.activation_checkpointing == "selective":
        yield (
            f"train.activation_checkpointing=selective with parallel.ep={parallel.ep}: torch fails "
            "where experts are sharded apart from their block; use full or none"
        )
    if parallel.ddp.static_graph and parallel.ep > 1:
        yield f"parallel.ddp.static_graph=true with parallel.ep={parallel.ep}: it is one of DDP"


def _context(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit context parallel, of our own classes: others are built first."""
    able = {"model": "hpctrain.models.Transformer", "task": "hpctrain.tasks.LanguageModel"}
    for section, needed in able.items() if degrees.cp > 1 else ():
        target = str(getattr(config, section).get("_target_"))
        package, _, kind = needed.rpartition(".")
        if target.startswith(f"{package}.") and not target.endswith(f".{kind}"):
            yield (
                f"{section}._target_={target} with parallel.cp={degrees.cp}: it needs whole "
                f"samples; context parallel divides the sequences of {needed}"
            )


def _replicas(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit gradient compression and local SGD."""
    parallel, precision = config.parallel, config.precision
    kind, local = config.train.compression.kind, config.train.local_sgd
    chosen = [f"train.compression.kind={kind}"] if kind != "none" else []
    chosen += [f"train.local_sgd.every={local.every}"] if local.every is not None else []
    if len(chosen) == 2:
        yield f"{chosen[0]} and {chosen[1]}: give one of them, replicas send no gradients"
    for key in chosen:
        if degrees.ranks != degrees.dp_replicate:
            yield f"{key} with {degrees}: it needs whole replicas (DDP), so only dp_replicate"
        if parallel.fsdp.offload:
            yield f"{key} with parallel.fsdp.offload=true: it needs whole replicas (DDP)"
        if parallel.ep > 1:
            yield f"{key} with parallel.ep={parallel.ep}: it needs whole replicas (DDP)"
        if parallel.sync == "every":
            yield f"{key} with parallel.sync=every: use last or auto"
        if precision.reduce is not None:
            yield f"{key} with precision.reduce={precision.reduce}: use null"
        if precision.compute == "fp16":
            yield f"{key} with precision.compute=fp16: ranks would not agree on overflows; use bf16"
        if config.train.nonfinite == "skip" and kind != "int8":
            yield (
                f"train.nonfinite=skip with {key}: what a NaN leaves in the replicas, or in the "
                "errors of the compression, cannot be undone; use stop or rollback"
            )
    if local.every is not None and parallel.ddp.static_graph:
        yield f"parallel.ddp.static_graph=true with {chosen[-1]}: torch cannot have both"
