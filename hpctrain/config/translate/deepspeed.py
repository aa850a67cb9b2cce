"""`python -m hpctrain from-deepspeed FILE`: translate a config of DeepSpeed.

    zero_optimization ── parallel.*     fp16, bf16 ── precision.*      train_batch_size ── train.*
    optimizer ── optimizer.*            scheduler ── scheduler.*       gradient_clipping ── train.*

Reference: https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpctrain.config.rules import targets
from hpctrain.config.schema import all_keys
from hpctrain.config.translate.deepspeed_keys import (
    NOT_TORCH,
    OPTIONS,
    OTHER_OPTIMIZERS,
    OTHER_SCHEDULERS,
    REASONS,
)
from hpctrain.config.translate.foreign_config import Source
from hpctrain.config.translate.translation import Translation, parser, read, show
from hpctrain.disk import parse_json
from hpctrain.errors import ConfigError

_FORMATS = {
    name: short
    for short, long in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))
    for name in (short, long, f"torch.{long}")
}
_RARE = 10_000  # steps; a larger number is a way to print nothing
_DEVICES = {name: name for name in ("none", "cpu", "nvme")}


def main(argv: list[str]) -> int:
    """Print the translation of a file."""
    made = parser("from-deepspeed", "DeepSpeed")
    made.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="the number of ranks, where the batch size depends on it",
    )
    options = made.parse_args(argv)
    show(translate(load(options.file), str(options.file), options.ranks), options, "DeepSpeed")
    return 0


def load(file: Path) -> dict[str, Any]:
    """Return the content of a DeepSpeed config, a JSON object in which lines of comments may be."""
    text = re.sub(r"^\s*(//|#).*$", "", read(file), flags=re.MULTILINE)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a config of DeepSpeed (it has no keys)")
    return content


def translate(content: dict[str, Any], file: str, ranks: int | None = None) -> Translation:
    """Translate a config of DeepSpeed; an unknown key or value is a ConfigError."""
    content = {key: value for key, value in content.items() if not key.startswith("_")}
    if isinstance(content.get("zero_optimization"), bool):  # the form before there were stages
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    if "bfloat16" in content:
        content.setdefault("bf16", content.pop("bfloat16"))
    source, made = Source(file, content, REASONS), Translation()
    _zero(source, made)
    _precision(source, made)
    _batch(source, made, ranks)
    _optimizer(source, made)
    _scheduler(source, made)
    if "activation_checkpointing" in source:
        # DeepSpeed checkpoints where the model calls it, which a file cannot show.
        made.values["train.activation_checkpointing"] = "full"
    steps = source.number("steps_per_print", None, "train.log_every")
    if steps is not None and 1 <= steps <= _RARE:
        made.values["train.log_every"] = int(steps)
    elif steps is not None:
        source.drop("steps_per_print")
    if source.take("flops_profiler.enabled"):
        step = int(source.number("flops_profiler.profile_step", 1))
        made.values["train.profile"] = f"{step}-{step}"
    if source.take("fp32_allreduce"):
        made.values["precision.reduce"] = "fp32"
    tp = source.number("tensor_parallel.autotp_size", None, "parallel.tp")
    if tp is not None and tp > 1:
        made.values["parallel.tp"] = tp
    drop_last = source.take("dataloader_drop_last")
    if drop_last is not None:
        made.values["data.tail"] = "drop" if drop_last else "pad"
    made.left |= source.left()
    return made


def _zero(source: Source, made: Translation) -> None:
    stage = source.choice("zero_optimization.stage", {n: n for n in range(4)}, 0)
    parts = ("param", "optimizer")
    devices = {part: _offload(source, f"zero_optimization.offload_{part}") for part in parts}
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param")):
        if source.take(f"zero_optimization.{old}"):
            devices[part] = "cpu"
    offload = {part for part, device in devices.items() if device != "none"}
    made.choices["parallel"] = f"zero{stage}" if stage else "ddp"
    if offload and stage == 3:
        made.choices["parallel"] = "offload"
    elif offload and stage:
        made.values["parallel.fsdp.offload"] = True
    if offload == {"optimizer"} and stage:
        source.drop(
            "zero_optimization.offload_optimizer.device",
            "parallel.fsdp.offload keeps parameters and gradients in the memory of the host, too",
        )
    for part in offload:
        name = f"zero_optimization.offload_{part}.device"
        if not stage:
            source.drop(name, "stage 0 offloads nothing")
        elif devices[part] == "nvme":
            source.drop(name, "parallel.fsdp.offload uses the memory of the host, not NVMe")
    hpz, mics = "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"
    secondary, shard = source.number(hpz, 1), source.number(mics, -1)
    if stage != 3:
        source.drop(hpz)
        source.drop(mics)
        return
    if secondary > 1:
        made.values["parallel.fsdp.reshard_after_forward"] = secondary
    if shard > 0:
        made.values |= {"parallel.dp_replicate": -1, "parallel.dp_shard": shard}


def _offload(source: Source, section: str) -> str:
    """Return the device of an offload section: none, cpu or nvme."""
    source.take(section)  # null is no section
    device: str = source.choice(f"{section}.device", _DEVICES, "none")
    return device


def _precision(source: Source, made: Translation) -> None:
    enabled = [
        kind
        for kind in ("fp16", "bf16")
        if source.take(f"{kind}.enabled", False, f"precision.compute={kind} or fp32")
    ]
    if len(enabled) > 1:
        raise ConfigError(f"{source.file}: fp16 and bf16 are both enabled; DeepSpeed allows one")
    autocast = source.choice("torch_autocast.dtype", _FORMATS)
    if source.take("torch_autocast.enabled"):
        enabled = [autocast or "bf16"]
    automatic = any(source.is_auto(f"{kind}.enabled") for kind in ("fp16", "bf16"))
    if enabled == ["fp16"]:
        made.values["precision.compute"] = "fp16"
    elif enabled == ["bf16"]:
        made.choices["precision"] = "bf16"
    elif not automatic:
        made.choices["precision"] = "fp32"
    _loss_scale(source)
    if source.take("bf16.bf16_master_weights_and_grads"):
        made.values["precision.params"] = "bf16"
    if reduce := source.choice("communication_data_type", _FORMATS):
        made.values["precision.reduce"] = reduce
    grads = source.choice("data_types.grad_accum_dtype", _FORMATS)
    if grads is not None and grads != made.values.get("precision.params", "fp32"):
        source.drop("data_types.grad_accum_dtype")


def _loss_scale(source: Source) -> None:
    ours = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000}
    for name, value in ours.items():
        if source.take(f"fp16.{name}", value) != value:
            source.drop(f"fp16.{name}")


def _batch(source: Source, made: Translation, ranks: int | None) -> None:
    name = "train_micro_batch_size_per_gpu"
    total = source.number("train_batch_size", None, "train.global_batch_size")
    micro = source.number(name, None, "train.accumulate")
    parts = source.number("gradient_accumulation_steps", None, "train.accumulate")
    if total is not None:
        made.values["train.global_batch_size"] = total
    elif micro is not None and ranks is not None:
        made.values["train.global_batch_size"] = micro * (parts or 1) * ranks
    elif micro is not None:
        source.drop(
            name,
            f"train.global_batch_size is {micro} x gradient_accumulation_steps {parts or 1} x the "
            "number of ranks: give --ranks N",
        )
    if parts is not None:
        made.values["train.accumulate"] = parts
    if total is None or micro is None:
        return
    if parts is None and ranks is None:
        made.values["train.micro_batch_size"] = str(micro)
        return
    share = micro * (parts or 1) * (ranks or 1)
    if total % share or (parts is not None and ranks is not None and total != share):
        raise ConfigError(
            f"{source.file}: train_batch_size {total} is not {name} {micro} x "
            f"gradient_accumulation_steps {parts or '...'} x {ranks or '...'} ranks"
        )
    if parts is None:
        made.values["train.accumulate"] = total // share
    elif ranks is None:
        source.drop(name, f"it is the share of a rank when there are {total // share} ranks")


def _optimizer(source: Source, made: Translation) -> None:
    kind = source.take("optimizer.type")
    params = "optimizer.params."
    lr = source.number(f"{params}lr", None, "optimizer.lr")
    decay = source.number(f"{params}weight_decay", None, "optimizer.weight_decay")
    clip = source.number(f"{params}max_grad_norm", None, "train.clip_norm")
    clip = source.number("gradient_clipping", clip, "train.clip_norm")
    if not source.is_auto("gradient_clipping"):
        made.values["train.clip_norm"] = clip or None  # DeepSpeed clips nothing by default
    adam_w = source.take(f"{params}adam_w_mode", True)
    if kind is None:
        return
    if lr is not None:
        made.values["optimizer.lr"] = lr
    if not source.is_auto(f"{params}weight_decay"):
        made.values["optimizer.weight_decay"] = decay or 0.0
    options = {
        name: value
        for name in OPTIONS
        if (value := source.take(f"{params}{name}", None, "optimizer.options")) is not None
    }
    names = {"adam": "AdamW" if adam_w else "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
    target = f"torch.optim.{names.get(kind.lower(), kind)}"
    if reason := NOT_TORCH.get(kind.lower()) or targets.problem(target):
        source.drop("optimizer.type", f"{reason}: name a class in optimizer._target_")
        for name in (*options, *OTHER_OPTIMIZERS):
            source.drop(f"{params}{name}", "it belongs to the optimizer: see optimizer.options")
        return
    made.values["optimizer._target_"] = target
    if options:
        made.values["optimizer.options"] = options


_SCHEDULERS = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "OneCycle": "one_cycle",
}


def _scheduler(source: Source, made: Translation) -> None:
    kind = source.take("scheduler.type")
    params = "scheduler.params."
    steps = source.number(f"{params}warmup_num_steps", None, "scheduler.warmup_steps")
    peak = source.number(f"{params}warmup_max_lr", None, "optimizer.lr")
    total = source.number(f"{params}total_num_steps", None, "train.max_steps")
    final = source.number(f"{params}cos_min_ratio", 1e-4, "scheduler.final_ratio")
    shape = source.take(f"{params}warmup_type", "log")
    lowest = [source.number(f"{params}warmup_{name}", 0) for name in ("min_lr", "min_ratio")]
    if kind is None:
        if "optimizer" in source:
            made.choices["scheduler"] = "constant"  # without one DeepSpeed changes nothing
        return
    if kind not in _SCHEDULERS:
        (known,) = (each for each in all_keys() if each.name == "scheduler.kind")
        source.drop("scheduler.type", f"scheduler.kind has {known.rule.allowed}")
        for name in OTHER_SCHEDULERS:
            source.drop(f"{params}{name}", "it belongs to that scheduler")
        return
    made.choices["scheduler"] = _SCHEDULERS[kind]
    if kind == "OneCycle":
        _one_cycle(source, made)
        return
    if steps is not None or f"{params}warmup_num_steps" not in source:
        made.values["scheduler.warmup_steps"] = 1000 if steps is None else int(steps)
    if kind == "WarmupDecayLR" and f"{params}warmup_max_lr" not in source:
        peak = 0.001
    if peak is not None and kind != "WarmupCosineLR":
        made.values["optimizer.lr"] = peak
    if kind == "WarmupCosineLR":
        made.values["scheduler.final_ratio"] = final
    if total is not None:
        made.values["train.max_steps"] = int(total)
    if shape != "linear":
        source.drop(f"{params}warmup_type")
        if f"{params}warmup_type" not in source:
            made.left[f"{params}warmup_type=log (by default)"] = REASONS[f"{params}warmup_type"]
    for name, value in zip(("min_lr", "min_ratio"), lowest, strict=True):
        if value:
            source.drop(f"{params}warmup_{name}")


def _one_cycle(source: Source, made: Translation) -> None:
    """Translate a cycle, whose rate rises and falls along cosines here, and ends the run."""
    params = "scheduler.params."
    low, high = (source.number(f"{params}cycle_{name}_lr", None) for name in ("min", "max"))
    rise = source.number(f"{params}cycle_first_step_size", 2000)
    fall = source.number(f"{params}cycle_second_step_size", rise)
    made.values |= {"train.max_steps": int(rise + fall), "scheduler.warmup_steps": 0}
    made.values["scheduler.rise_fraction"] = rise / (rise + fall)
    if high is not None:
        made.values["optimizer.lr"] = high
    if low is not None and high:
        made.values |= dict.fromkeys(
            ("scheduler.initial_ratio", "scheduler.final_ratio"), low / high
        )
