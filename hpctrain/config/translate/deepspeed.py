"""`python -m hpctrain.config.translate FILE`: translate a config of DeepSpeed.

    zero_optimization ── parallel.*     fp16, bf16 ── precision.*      train_batch_size ── train.*
    optimizer ── optimizer.*            scheduler ── scheduler.*       gradient_clipping ── train.*

`deepspeed_keys` has the table of all keys; here are the rules of those that depend on others.
Reference: https://www.deepspeed.ai/docs/config-json
"""

import re
from pathlib import Path
from typing import Any

from hpctrain.config.rules import targets
from hpctrain.config.schema import all_keys
from hpctrain.config.translate.deepspeed_keys import KEYS, NOT_TORCH, OPTIONS, WARMUP
from hpctrain.config.translate.foreign_config import Source
from hpctrain.config.translate.translation import Translation, read
from hpctrain.disk import parse_json
from hpctrain.errors import ConfigError

_RARE = 10_000  # steps; a larger number is a way to print nothing
_SCHEDULERS = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "OneCycle": "one_cycle",
}


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
    source, made = Source(file, content, KEYS), Translation()
    _zero(source, made)
    _precision(source, made)
    _batch(source, made, ranks)
    _optimizer(source, made)
    _scheduler(source, made)
    if "activation_checkpointing" in source:
        # DeepSpeed checkpoints where the model calls it, which a file cannot show.
        made.values["train.activation_checkpointing"] = "full"
    if (steps := source.take("steps_per_print")) is not None:
        if 1 <= steps <= _RARE:
            made.values["train.log_every"] = int(steps)
        else:
            source.drop("steps_per_print")
    if source.take("flops_profiler.enabled"):
        step = int(source.take("flops_profiler.profile_step"))
        made.values["train.profile"] = f"{step}-{step}"
    if (tp := source.take("tensor_parallel.autotp_size")) is not None and tp > 1:
        made.values["parallel.tp"] = tp
    source.put_into(made)
    return made


def _zero(source: Source, made: Translation) -> None:
    zero = "zero_optimization."
    stage = source.take(f"{zero}stage")
    devices = {part: source.take(f"{zero}offload_{part}.device") for part in ("param", "optimizer")}
    for part in devices:
        source.take(f"{zero}offload_{part}")  # `false` is no section
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param")):
        if source.take(f"{zero}{old}"):
            devices[part] = "cpu"
    offload = {part for part, device in devices.items() if device != "none"}
    made.choices["parallel"] = f"zero{stage}" if stage else "ddp"
    if offload and stage == 3:
        made.choices["parallel"] = "offload"
    elif offload and stage:
        made.values["parallel.fsdp.offload"] = True
    if offload == {"optimizer"} and stage:
        source.drop(
            f"{zero}offload_optimizer.device",
            "parallel.fsdp.offload keeps parameters and gradients in the memory of the host, too",
        )
    for part in offload:
        name = f"{zero}offload_{part}.device"
        if not stage:
            source.drop(name, "stage 0 offloads nothing")
        elif devices[part] == "nvme":
            source.drop(name, "parallel.fsdp.offload uses the memory of the host, not NVMe")
    hpz, mics = f"{zero}zero_hpz_partition_size", f"{zero}mics_shard_size"
    secondary, shard = source.take(hpz), source.take(mics)
    if stage != 3:
        source.drop(hpz)
        source.drop(mics)
        return
    if secondary > 1:
        made.values["parallel.fsdp.reshard_after_forward"] = secondary
    if shard > 0:
        made.values |= {"parallel.dp_replicate": -1, "parallel.dp_shard": shard}


def _precision(source: Source, made: Translation) -> None:
    enabled = [kind for kind in ("fp16", "bf16") if source.take(f"{kind}.enabled")]
    if len(enabled) > 1:
        raise ConfigError(f"{source.file}: fp16 and bf16 are both enabled; DeepSpeed allows one")
    autocast = source.take("torch_autocast.dtype")
    if source.take("torch_autocast.enabled"):
        enabled = [autocast]
    automatic = any(source.is_auto(f"{kind}.enabled") for kind in ("fp16", "bf16"))
    if enabled == ["fp16"]:
        made.values["precision.compute"] = "fp16"
    elif enabled == ["bf16"]:
        made.choices["precision"] = "bf16"
    elif not automatic:
        made.choices["precision"] = "fp32"
    for name, ours in (("loss_scale", 0), ("initial_scale_power", 16), ("loss_scale_window", 2000)):
        if source.take(f"fp16.{name}") != ours:
            source.drop(f"fp16.{name}")
    params = "bf16" if source.take("bf16.bf16_master_weights_and_grads") else "fp32"
    if source.take("data_types.grad_accum_dtype") not in (None, params):
        source.drop("data_types.grad_accum_dtype")


def _batch(source: Source, made: Translation, ranks: int | None) -> None:
    name = "train_micro_batch_size_per_gpu"
    total, micro = source.take("train_batch_size"), source.take(name)
    parts = source.take("gradient_accumulation_steps")
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
    params = "optimizer.params."
    kind, adam_w = source.take("optimizer.type"), source.take(f"{params}adam_w_mode")
    lr, decay = source.take(f"{params}lr"), source.take(f"{params}weight_decay")
    clips = source.take(f"{params}max_grad_norm"), source.take("gradient_clipping")
    if not source.is_auto("gradient_clipping"):  # DeepSpeed clips nothing by default
        made.values["train.clip_norm"] = (clips[0] if clips[1] is None else clips[1]) or None
    if kind is None:
        return
    if lr is not None:
        made.values["optimizer.lr"] = lr
    if not source.is_auto(f"{params}weight_decay"):
        made.values["optimizer.weight_decay"] = decay or 0.0
    given = {name: source.take(f"{params}{name}") for name in OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    names = {"adam": "AdamW" if adam_w else "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
    target = f"torch.optim.{names.get(kind.lower(), kind)}"
    if reason := NOT_TORCH.get(kind.lower()) or targets.problem(target):
        source.drop("optimizer.type", f"{reason}: name a class in optimizer._target_")
        for name in options:
            source.drop(f"{params}{name}")
        return
    made.values["optimizer._target_"] = target
    if options:
        made.values["optimizer.options"] = options


def _scheduler(source: Source, made: Translation) -> None:
    params = "scheduler.params."
    kind, warmup_type = source.take("scheduler.type"), f"{params}warmup_type"
    steps, peak, total, final, shape = (
        source.take(f"{params}{name}")
        for name in (
            "warmup_num_steps",
            "warmup_max_lr",
            "total_num_steps",
            "cos_min_ratio",
            "warmup_type",
        )
    )
    lowest = [
        name for name in ("warmup_min_lr", "warmup_min_ratio") if source.take(f"{params}{name}")
    ]
    if kind is None:
        if "optimizer" in source:
            made.choices["scheduler"] = "constant"  # without one DeepSpeed changes nothing
        return
    if kind not in _SCHEDULERS:
        (known,) = (each for each in all_keys() if each.name == "scheduler.kind")
        source.drop("scheduler.type", f"scheduler.kind has {known.rule.allowed}")
        return
    made.choices["scheduler"] = _SCHEDULERS[kind]
    if kind == "OneCycle":
        _one_cycle(source, made)
        return
    if steps is not None or f"{params}warmup_num_steps" not in source:
        made.values["scheduler.warmup_steps"] = 1000 if steps is None else int(steps)
    if kind == "WarmupDecayLR" and f"{params}warmup_max_lr" not in source:
        peak = 0.001
    if kind == "WarmupCosineLR":
        made.values["scheduler.final_ratio"] = final
    elif peak is not None:
        made.values["optimizer.lr"] = peak
    if total is not None:
        made.values["train.max_steps"] = int(total)
    if shape != "linear":
        source.drop(warmup_type)
        if warmup_type not in source:
            made.left[f"{warmup_type}=log (by default)"] = WARMUP
    for name in lowest:
        source.drop(f"{params}{name}")


def _one_cycle(source: Source, made: Translation) -> None:
    """Translate a cycle, whose rate rises and falls along cosines here, and ends the run."""
    low, high, rise, fall = (
        source.take(f"scheduler.params.cycle_{name}")
        for name in ("min_lr", "max_lr", "first_step_size", "second_step_size")
    )
    whole = rise + (rise if fall is None else fall)
    made.values |= {"train.max_steps": int(whole), "scheduler.warmup_steps": 0}
    made.values["scheduler.rise_fraction"] = rise / whole
    if high is not None:
        made.values["optimizer.lr"] = high
    if low is not None and high:
        made.values |= dict.fromkeys(
            ("scheduler.initial_ratio", "scheduler.final_ratio"), low / high
        )
