"""Which ways of spreading a model over ranks, precisions and trainings go together.

What torch cannot do is refused here, before a job is submitted: some of it fails late, and some of
it would train wrongly without an error. This module does not import torch.
"""

from collections.abc import Iterator

from hpctrain.config.rules import division
from hpctrain.config.rules.batch_sizes import BatchSizes, named_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.pipeline_schedule import ZERO_BUBBLE, block_problem, parts_problem
from hpctrain.config.schema import Config
from hpctrain.config.schema.parallel import SCHEDULES

TRANSFORMER = ("hpctrain.models.Transformer", "hpctrain.models.transformer.Transformer")
# Models without a plan, and the modules that have them.
_OTHERS = {"MLP": "mlp", "ConvNet": "conv", "UNet": "unet"}


def parallel_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit together in `parallel`, `precision` and `train`."""
    parallel, train, precision = config.parallel, config.train, config.precision
    sharded = degrees.dp_shard > 1 or parallel.fsdp.offload
    kept = parallel.fsdp.reshard_after_forward
    if kept is not None:
        if parallel.zero != 3:
            yield (
                f"parallel.fsdp.reshard_after_forward={kept} divides parameters, which "
                f"parallel.zero={parallel.zero} does not"
            )
        elif degrees.dp_shard % kept:
            allowed = ", ".join(map(str, ["null", *division.factors(degrees.dp_shard)[1:]]))
            yield (
                f"parallel.fsdp.reshard_after_forward={kept}: it must be a factor of dp_shard "
                f"{degrees.dp_shard}: {allowed}"
            )
    if sharded and parallel.zero == 1 and parallel.sync == "every":
        yield "parallel.sync=every with parallel.zero=1 is parallel.zero=2"
    yield from _replicas(config, degrees)
    yield from _tensor(config, degrees)
    yield from division.ep_problems(degrees, parallel.ep)
    yield from _pipeline(config, degrees)
    yield from _context(config, degrees)
    if train.sync_batchnorm:
        yield from sync_problems(config, degrees)
    if precision.params == "bf16" and precision.compute != "bf16":
        yield (
            f"precision.params=bf16 with precision.compute={precision.compute}: numbers in the "
            "batch would not have the format of the parameters; use precision=pure_bf16, which "
            "computes in bf16, or precision.params=fp32"
        )
    if (precision.params == "fp64") != (precision.compute == "fp64"):
        yield (
            f"precision.params={precision.params} with precision.compute={precision.compute}: "
            "float64 is the format of everything in a run, or of nothing; use precision=fp64"
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
    if degrees.tp > 1 and parallel.device == "cpu" and compiled != "off":
        yield f"train.compile={compiled} with tp {degrees.tp} on CPUs: torch fails; use off"
    if degrees.tp > 1 and config.precision.compute == "fp8":
        yield f"precision.compute=fp8 with tp {degrees.tp}: use bf16, or tp 1"
    if parallel.ep > 1 and config.train.activation_checkpointing == "selective":
        yield (
            f"train.activation_checkpointing=selective with parallel.ep={parallel.ep}: torch fails "
            "where experts are sharded apart from their block; use full or none"
        )


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


def _pipeline(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit a pipeline."""
    parallel, train, pp = config.parallel, config.train, degrees.pp
    if pp == 1:
        return
    schedule, blocks = parallel.pipeline.schedule, parallel.pipeline.blocks
    stages, key = pp * SCHEDULES[schedule], f"parallel.pipeline.schedule={schedule}"
    if blocks is not None and len(blocks) != stages:
        yield (
            f"parallel.pipeline.blocks={blocks} has {len(blocks)} numbers: parallel.pp={pp} with "
            f"{key} makes {stages} stages, and each has one"
        )
    elif blocks is not None and min(blocks) < 1:
        yield f"parallel.pipeline.blocks={blocks}: each stage needs at least 1 block"
    if schedule in ZERO_BUBBLE:
        if parallel.zero == 3 and (degrees.dp_shard > 1 or parallel.fsdp.offload):
            yield (
                f"{key} with parallel.zero=3: torch computes wrong gradients; use zero=2, zero=1 "
                "or the schedule interleaved"
            )
        if train.compile != "off":
            yield (
                f"{key} with train.compile={train.compile}: torch cannot split a compiled backward "
                "pass; use train.compile=off or interleaved"
            )
        if train.activation_checkpointing == "selective":
            yield (
                f"{key} with train.activation_checkpointing=selective: torch cannot split such a "
                "backward pass; use full, none or the schedule interleaved"
            )
    if parallel.sync == "every":
        yield (
            f"parallel.sync=every with parallel.pp={pp}: a pipeline reduces gradients once per "
            "step; use auto or last"
        )
    if config.data.collate == "pack":
        yield f"data.collate=pack with parallel.pp={pp}: a packed batch has no micro-batches"
    elif train.micro_batch_size == "auto":
        yield (
            f"train.micro_batch_size=auto with parallel.pp={pp}: the ranks need different memory; "
            "give a number, or train.accumulate"
        )
    else:
        for key, size in named_sizes(train).items():
            if size % degrees.dp == 0:
                yield from _micro_batches(config, degrees, key, size)


def _micro_batches(config: Config, degrees: Degrees, key: str, size: int) -> Iterator[str]:
    """Yield why the number of micro-batches of a global batch does not fit the schedule."""
    train, pp, schedule = config.train, degrees.pp, config.parallel.pipeline.schedule
    sizes = BatchSizes.of(config, degrees, size)
    parts, share = sizes.accumulate, sizes.share
    if parts == 0 or share % parts or not (reason := parts_problem(schedule, pp, parts)):
        return
    fitting = [n for n in division.factors(share) if not parts_problem(schedule, pp, n)]
    near = division.neighbours(fitting, parts)
    if not near:
        advice = f"{key}={size} is too small for {pp} of them"
    elif train.micro_batch_size is None:
        advice = f"use train.accumulate={division.either(near)}"
    else:
        advice = f"use train.micro_batch_size={division.either(share // n for n in near)}"
    stage = f" and {key}={size}" if train.batch_size_ramp else ""
    yield f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}{stage}: {reason}; {advice}"


def division_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what the degrees do not divide."""
    if config.model.get("_target_") not in TRANSFORMER:
        return
    experts = config.model.get("experts")
    if isinstance(experts, int):
        yield from division.expert_problems("model.experts", experts, degrees, config.parallel)
    if degrees.ranks == degrees.dp:
        return
    heads = config.model.get("heads")
    numbers = {name: config.model.get(name) for name in ("heads", "kv_heads", "hidden")}
    numbers["kv_heads"] = numbers["kv_heads"] or heads
    known = {f"model.{name}": n for name, n in numbers.items() if isinstance(n, int) and n > 0}
    yield from division.number_problems(known, degrees.tp)
    if config.data.windows.field is not None and config.data.windows.length is not None:
        tp = degrees.tp if config.parallel.sequence_parallel else 1
        parts = division.sequence_parts(degrees.cp, tp)
        positions = config.data.windows.length - 1  # the last token is only a target
        if positions % parts:
            near = division.either(n + 1 for n in division.nearest(positions, parts))
            yield (
                f"data.windows.length={config.data.windows.length} has {positions} positions, "
                f"which {parts} parts (cp {degrees.cp}, tp {degrees.tp}) do not divide evenly: use "
                f"a length of {near}"
            )


def own_model_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what a model of `hpctrain.models` does not have, although the degrees need it."""
    parallel, model = config.parallel, config.model
    target = str(model.get("_target_"))
    package, _, kind = target.rpartition(".")
    if package in ("hpctrain.models", f"hpctrain.models.{_OTHERS.get(kind)}") and kind in _OTHERS:
        if parallel.ep > 1:
            yield f"parallel.ep={parallel.ep}: {target} has no experts; use 1"
        if degrees.pp > 1:
            yield f"parallel.pp={degrees.pp}: {target} has no plan for pipeline parallel; use 1"
        if degrees.tp > 1 and not parallel.plan:
            yield (
                f"parallel.tp={degrees.tp}: {target} has no plan for tensor parallel; use 1, or "
                "give the styles of its modules in parallel.plan"
            )
    if target not in TRANSFORMER:
        return
    layers, experts = model.get("layers"), model.get("experts")
    if parallel.ep > 1 and experts is None:
        yield f"parallel.ep={parallel.ep}: the model has no experts; model.experts=8 gives it some"
    if experts is not None and parallel.plan:
        yield f"parallel.plan={parallel.plan}: a model with experts divides itself; leave it out"
    if degrees.pp > 1 and model.get("tied") is True:
        yield (
            f"parallel.pp={degrees.pp} with model.tied=true: the first and the last stage cannot "
            "share the embedding; use model.tied=false"
        )
    if degrees.pp > 1 and isinstance(layers, int):
        what = f"model.layers={layers} gives {layers} blocks"
        if problem := block_problem(what, layers, parallel, degrees.pp):
            yield problem
