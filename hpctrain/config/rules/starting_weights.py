"""What must hold for the weights that a run starts from, as far as the config alone shows it."""

from collections.abc import Iterator

from hpctrain.config.schema import CheckpointConfig, ParallelConfig, PrecisionConfig, TrainConfig


def problems(
    checkpoint: CheckpointConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
) -> Iterator[str]:
    """Yield what is wrong in the keys `checkpoint.init_*` and `train.lora`."""
    if checkpoint.init_from is None:
        for name in ("init_digest", "init_rename", "init_skip"):
            if value := getattr(checkpoint, name):
                yield f"checkpoint.{name}={value} needs checkpoint.init_from"
        if train.lora.patterns:
            yield (
                f"train.lora.match={train.lora.match} needs checkpoint.init_from: the "
                "weights that the adapters are added to"
            )
        return
    yield from adapter_problems(train, parallel, precision)
    if "://" in checkpoint.init_from:
        yield (
            f"checkpoint.init_from={checkpoint.init_from}: it must be a folder or a file on a disk "
            "that the nodes see; download it first"
        )
    for i, rule in enumerate(checkpoint.init_rename):
        key = f"checkpoint.init_rename[{i}]"
        texts = [rule.get("match"), rule.get("to")]
        if set(rule) != {"match", "to"} or not all(isinstance(each, str) for each in texts):
            yield f"{key}={rule}: it must be {{match: PATTERN, to: NAME}}"
            continue
        stars = [str(each).count("*") for each in texts]
        if stars[1] not in (0, stars[0]):
            yield f"{key}={rule}: `to` has {stars[1]} times *, `match` has {stars[0]}"


def adapter_problems(
    train: TrainConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> Iterator[str]:
    """Yield what cannot be together with adapters, and with a base in 4 bits."""
    lora = train.lora
    if not lora.patterns:
        return
    if precision.compute == "fp8":
        yield "train.lora with precision.compute=fp8: its layers have no adapters; use bf16"
    if lora.dropout and parallel.tp > 1:
        yield (
            f"train.lora.dropout={lora.dropout} with parallel.tp={parallel.tp}: the ranks of a "
            "layer would draw different masks; use 0"
        )
    if not lora.quantize:
        return
    what = f"train.lora.quantize={lora.quantize}"
    for name in ("tp", "pp", "cp", "ep"):
        if (degree := getattr(parallel, name)) > 1:
            yield (
                f"{what} with parallel.{name}={degree}: a weight in 4 bits is packed in blocks "
                "and cannot be divided; use parallel=ddp, or leave train.lora.quantize out"
            )
    if parallel.dp_shard != 1 or parallel.fsdp.offload:
        yield (
            f"{what} with parallel.dp_shard={parallel.dp_shard} and "
            f"parallel.fsdp.offload={str(parallel.fsdp.offload).lower()}: FSDP2 cannot divide a "
            "weight in 4 bits; use parallel=ddp, or leave train.lora.quantize out, because "
            "parallel=zero3 divides the base over the ranks"
        )
    if precision.compute == "fp64":
        yield f"{what} with precision.compute=fp64: a weight in 4 bits is unpacked to 32 at most"
    if train.compile != "off":
        yield f"{what} with train.compile={train.compile}: not tested; use off"
