"""Configs of DeepSpeed and Accelerate: one table of keys for both, and the rules of some of them.

    zero_optimization, fsdp_config ── parallel.*   train_batch_size ── train.*   fp16 ── precision.*
    optimizer ── optimizer.*   scheduler ── scheduler.*   num_processes, num_machines ── launch.*

Every other key is left, and named in the result: releases add keys, and people add their own.
References: https://www.deepspeed.ai/docs/config-json,
https://huggingface.co/docs/accelerate/package_reference/cli
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain import yaml_file
from hpctrain.config.translate.translation import Translation, read
from hpctrain.disk import parse_json
from hpctrain.errors import ConfigError

_NO = "no counterpart (docs/migrate.md, docs/parallel.md)"
_AUTO = "the Hugging Face Trainer fills it in: set it here"
_TYPES = {float: (int, float), str: (str, list)}
_NOUNS = {float: "number", bool: "switch", str: "text", list: "list"}
_FORMATS = {name: name for name in ("fp32", "fp16", "bf16")}
_DEVICES = {"none": "", "cpu": "cpu", "nvme": "nvme"}
_STRATEGIES = {
    "full_shard": ("zero3", 3),
    "shard_grad_op": ("zero2", 2),
    "no_shard": ("ddp", 3),
    "hybrid_shard": ("hsdp", 3),
    "hybrid_shard_zero2": ("hsdp", 2),
}
_NUMBERED = {str(n): value for n, value in enumerate(_STRATEGIES.values(), 1)}
_RESHARD = {"true": ("zero3", 3), "false": ("zero2", 2)} | _STRATEGIES | _NUMBERED
_ZERO, _FSDP, _DS = "zero_optimization.", "fsdp_config.fsdp_", "deepspeed_config."
_OPTIMIZER, _SCHEDULER = "optimizer.params.", "scheduler.params."
_DEGREES = "parallelism_config.parallelism_config_"
# What a value must be (a type, or what each choice becomes), and our key that gets it as it is.
KEYS: dict[str, tuple[Any, str]] = {
    "train_batch_size": (float, "train.global_batch_size"),
    "train_micro_batch_size_per_gpu": (float, ""),
    "gradient_accumulation_steps": (float, "train.accumulate"),
    "gradient_clipping": (float, ""),
    "steps_per_print": (float, ""),
    "communication_data_type": (_FORMATS, "precision.reduce"),
    "tensor_parallel.autotp_size": (float, "parallel.tp"),
    f"{_ZERO}stage": ({str(stage): stage for stage in range(4)}, ""),
    f"{_ZERO}offload_optimizer.device": (_DEVICES, ""),
    f"{_ZERO}offload_param.device": (_DEVICES, ""),
    f"{_ZERO}zero_hpz_partition_size": (float, ""),
    f"{_ZERO}mics_shard_size": (float, ""),
    "fp16.enabled": (bool, ""),
    "bf16.enabled": (bool, ""),
    "optimizer.type": (str, ""),
    f"{_OPTIMIZER}lr": (float, "optimizer.lr"),
    f"{_OPTIMIZER}weight_decay": (float, ""),
    f"{_OPTIMIZER}betas": (list, ""),
    f"{_OPTIMIZER}eps": (float, ""),
    f"{_OPTIMIZER}momentum": (float, ""),
    f"{_OPTIMIZER}adam_w_mode": (bool, ""),
    "scheduler.type": (str, ""),
    f"{_SCHEDULER}warmup_num_steps": (float, ""),
    f"{_SCHEDULER}warmup_max_lr": (float, ""),
    f"{_SCHEDULER}warmup_type": (str, ""),
    f"{_SCHEDULER}total_num_steps": (float, "train.max_steps"),
    f"{_SCHEDULER}cos_min_ratio": (float, ""),
    # Accelerate
    "compute_environment": ({"local_machine": ""}, ""),
    "distributed_type": (
        {n: n for n in ("no", "multi_gpu", "multi_cpu", "fsdp", "deepspeed")},
        "",
    ),
    "num_machines": (float, ""),
    "num_processes": (float, ""),
    "mixed_precision": ({"no": "fp32", "false": "fp32", "fp8": "fp8"} | _FORMATS, ""),
    "use_cpu": (bool, ""),
    f"{_FSDP}version": (float, ""),
    f"{_FSDP}sharding_strategy": (_STRATEGIES | _NUMBERED, ""),
    f"{_FSDP}reshard_after_forward": (_RESHARD, ""),  # version 1 accepts a strategy here, too
    f"{_FSDP}offload_params": (bool, ""),
    f"{_FSDP}transformer_layer_cls_to_wrap": (str, ""),
    f"{_FSDP}activation_checkpointing": (bool, ""),
    f"{_DS}deepspeed_config_file": (str, ""),
    f"{_DS}zero_stage": (float, ""),
    f"{_DS}gradient_accumulation_steps": (float, ""),
    f"{_DS}gradient_clipping": (float, ""),
    f"{_DS}offload_optimizer_device": (str, ""),
    f"{_DS}offload_param_device": (str, ""),
    "dynamo_config.dynamo_backend": ({"no": "", "inductor": "model"}, ""),
    "dynamo_config.dynamo_use_regional_compilation": (bool, ""),
    **{f"{_DEGREES}{n}_size": (float, f"parallel.{n}") for n in ("dp_replicate", "dp_shard", "cp")},
    f"{_DEGREES}tp_size": (float, "parallel.tp"),
}
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = {
    name.lower(): f"torch.optim.{name}"
    for name in ("Adam", "AdamW", "Adagrad", "SGD", "RMSprop", "NAdam", "RAdam", "Adadelta")
}


class _Source:
    """The values of a file by their dotted names; what nobody takes is left."""

    def __init__(self, file: str, content: Mapping[str, Any], made: Translation) -> None:
        self.file, self.made = file, made
        self.values = {name: value for name, value in _leaves(content) if value is not None}
        self.auto = {name for name, value in self.values.items() if value == "auto"}
        if self.values and not any(_known(name) for name in self.values):
            lines = (f"{file}: {name}: {_unknown(name)}" for name in self.values)
            raise ConfigError("\n".join(lines))

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; the default if it is missing, null or "auto"."""
        kind, ours = KEYS[name]
        value = self.values.pop(name, None)
        if name in self.auto:
            self.leave(name, "auto", _AUTO)
        if value is None or name in self.auto:
            return default
        where, shown = f"{self.file}: {name}={_shown(value)}", _shown(value).lower()
        if isinstance(kind, dict):
            if shown not in kind:
                raise ConfigError(f"{where}: allowed are {', '.join(kind)}")
            value = kind[shown]
        elif not isinstance(value, _TYPES.get(kind, kind)) or (
            kind is float and isinstance(value, bool)
        ):
            raise ConfigError(f"{where}: it must be a {_NOUNS[kind]}")
        if ours and (value != 1 or ours not in ("parallel.tp", "parallel.cp")):
            self.made.values[ours] = value
        return value

    def leave(self, name: str, value: Any, reason: str = _NO) -> None:
        self.made.left[f"{name}={_shown(value)}"] = reason

    def leave_others(self) -> None:
        """Take what is here by the table alone, and name what has no counterpart."""
        for name in [name for name in self.values if KEYS.get(name, ("", ""))[1]]:
            self.take(name)
        for name, value in self.values.items():
            self.leave(name, value, _AUTO if name in self.auto else _unknown(name))


def load(file: Path) -> dict[str, Any]:
    """Return the content: JSON, in which lines of comments may be, or YAML."""
    text = read(file)
    if file.suffix == ".json":
        try:
            content = parse_json(re.sub(r"^\s*(//|#).*$", "", text, flags=re.MULTILINE))
        except ValueError as error:
            raise ConfigError(f"{file}: not JSON ({error})") from error
    else:
        texts = ("mixed_precision", "distributed_type", "dynamo_config.dynamo_backend")
        content = yaml_file.parse(text, str(file), dict.fromkeys(texts, "str"))
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a config of DeepSpeed or Accelerate (it has no keys)")
    return content


def translate(content: dict[str, Any], file: Path, ranks: int | None = None) -> Translation:
    """Translate a config of one of them; a wrong value is a ConfigError."""
    if {"compute_environment", "distributed_type", "num_processes", "num_machines"} & {*content}:
        return _accelerate(content, file)
    return _deepspeed(content, str(file), ranks)


def _deepspeed(content: dict[str, Any], file: str, ranks: int | None) -> Translation:
    source = _Source(file, content, made := Translation())
    values, choices = made.values, made.choices
    stage = source.take(f"{_ZERO}stage", 0)
    devices = {p: source.take(f"{_ZERO}offload_{p}.device") for p in ("optimizer", "param")}
    parts = [part for part, device in devices.items() if device]
    choices["parallel"] = f"zero{stage}" if stage else "ddp"
    if parts and stage == 3:
        choices["parallel"] = "offload"
    elif parts and stage:
        values["parallel.fsdp.offload"] = True
    for part in parts:
        if not stage or devices[part] == "nvme" or parts == ["optimizer"]:
            reason = "stage 1 to 3 with parallel.fsdp.offload have all state in the host's memory"
            source.leave(f"{_ZERO}offload_{part}.device", devices[part], reason)
    if stage == 3:
        if (secondary := source.take(f"{_ZERO}zero_hpz_partition_size", 1)) > 1:
            values["parallel.fsdp.reshard_after_forward"] = secondary
        if (shard := source.take(f"{_ZERO}mics_shard_size", 0)) > 0:
            values |= {"parallel.dp_replicate": -1, "parallel.dp_shard": shard}
    formats = [kind for kind in ("fp16", "bf16") if source.take(f"{kind}.enabled")]
    if len(formats) > 1:
        raise ConfigError(f"{file}: fp16 and bf16 are both enabled; DeepSpeed allows one")
    _precision(formats[0] if formats else "fp32", made, "fp16.enabled" in source.auto)
    _batch(source, made, ranks)
    if "gradient_clipping" not in source.auto:  # DeepSpeed clips nothing by default
        values["train.clip_norm"] = source.take("gradient_clipping") or None
    if 1 <= (steps := source.take("steps_per_print", 0)) <= 10_000:  # more is a way to print none
        values["train.log_every"] = int(steps)
    _optimizer(source, made)
    _scheduler(source, made)
    if "activation_checkpointing" in content:
        # DeepSpeed checkpoints where the model calls it, which a file cannot show.
        values["train.activation_checkpointing"] = "full"
    source.leave_others()
    return made


def _precision(kind: str, made: Translation, is_auto: bool = False) -> None:
    if kind in ("bf16", "fp32") and not is_auto:
        made.choices["precision"] = kind
    elif not is_auto:
        made.values["precision.compute"] = kind


def _batch(source: _Source, made: Translation, ranks: int | None) -> None:
    name = "train_micro_batch_size_per_gpu"
    total, micro = source.take("train_batch_size"), source.take(name)
    parts = source.take("gradient_accumulation_steps")
    if micro is None:
        return
    if total is None and ranks is None:
        source.leave(
            name,
            micro,
            f"train.global_batch_size is {micro} x gradient_accumulation_steps {parts or 1} x the "
            "number of ranks: give --ranks N",
        )
    elif total is None and ranks is not None:
        made.values["train.global_batch_size"] = micro * (parts or 1) * ranks
    elif parts is None:
        made.values["train.micro_batch_size"] = str(micro)
    elif total % (micro * parts) or (ranks is not None and total != micro * parts * ranks):
        raise ConfigError(
            f"{source.file}: train_batch_size {total} is not {name} {micro} x "
            f"gradient_accumulation_steps {parts} x {ranks or '...'} ranks"
        )
    elif ranks is None:
        reason = f"it is the share of a rank when there are {total // (micro * parts)} ranks"
        source.leave(name, micro, reason)


def _optimizer(source: _Source, made: Translation) -> None:
    kind = source.take("optimizer.type")
    if kind is None:
        return
    decay, adam_w = (source.take(f"{_OPTIMIZER}{n}") for n in ("weight_decay", "adam_w_mode"))
    given = {name: source.take(f"{_OPTIMIZER}{name}") for name in ("betas", "eps", "momentum")}
    options = {name: value for name, value in given.items() if value is not None}
    # DeepSpeed's Adam is AdamW, unless it says otherwise.
    name = "adamw" if kind.lower() == "adam" and adam_w is not False else kind.lower()
    if name not in _OPTIMIZERS:
        source.leave("optimizer.type", kind, "optimizer._target_ names a class")
        for option, value in options.items():
            source.leave(f"{_OPTIMIZER}{option}", value)
    else:
        made.values["optimizer._target_"] = _OPTIMIZERS[name]
        if options:
            made.values["optimizer.options"] = options
    if f"{_OPTIMIZER}weight_decay" not in source.auto:
        made.values["optimizer.weight_decay"] = decay or 0.0
    source.take(f"{_OPTIMIZER}lr")


def _scheduler(source: _Source, made: Translation) -> None:
    kind = source.take("scheduler.type")
    if kind is None or kind not in _SCHEDULERS:
        if kind is not None:
            source.leave("scheduler.type", kind, "scheduler.kind, or a class by its _target_")
        elif "optimizer._target_" in made.values:
            made.choices["scheduler"] = "constant"  # without one DeepSpeed changes nothing
        return
    made.choices["scheduler"] = _SCHEDULERS[kind]
    if f"{_SCHEDULER}warmup_num_steps" not in source.auto:
        steps = source.take(f"{_SCHEDULER}warmup_num_steps", 1000)
        made.values["scheduler.warmup_steps"] = int(steps)
    shape = source.take(f"{_SCHEDULER}warmup_type", "log")
    if shape != "linear":  # DeepSpeed's default is log
        source.leave(f"{_SCHEDULER}warmup_type", shape, "the rate rises linearly")
    if kind == "WarmupCosineLR":
        made.values["scheduler.final_ratio"] = source.take(f"{_SCHEDULER}cos_min_ratio", 1e-4)
    elif f"{_SCHEDULER}warmup_max_lr" not in source.auto:
        peak = source.take(f"{_SCHEDULER}warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None)
        made.values |= {"optimizer.lr": peak} if peak is not None else {}


def _accelerate(content: dict[str, Any], path: Path) -> Translation:
    source = _Source(str(path), content, made := Translation())
    source.take("compute_environment")
    kind, precision = source.take("distributed_type", "no"), source.take("mixed_precision")
    ranks = _ranks(source, made, alone=kind == "no", cpu=kind == "multi_cpu")
    if kind == "deepspeed":
        inner, where = _deepspeed_part(source, path, precision)
        given = _deepspeed(inner, where, ranks)
        made.choices |= given.choices
        made.values |= given.values
        made.left |= given.left
    elif precision is not None:
        _precision(precision, made)
    if kind == "fsdp":
        _fsdp(source, made)
    elif kind != "deepspeed":
        made.choices["parallel"] = "single" if kind == "no" else "ddp"
    blocks = source.take("dynamo_config.dynamo_use_regional_compilation")
    if how := source.take("dynamo_config.dynamo_backend"):
        made.values["train.compile"] = "blocks" if blocks else how
    source.leave_others()
    if "train.global_batch_size" not in made.values:
        made.left["batch size"] = (
            "the program sets that of a process; train.global_batch_size is that of all ranks"
        )
    return made


def _ranks(source: _Source, made: Translation, alone: bool, cpu: bool) -> int | None:
    """Translate the number of processes; return it, or None if the launcher gives it."""
    nodes, ranks = source.take("num_machines", 1), source.take("num_processes", 0)
    cpu = bool(source.take("use_cpu")) or cpu
    if alone:
        for name, number in (("num_processes", ranks), ("num_machines", nodes)):
            if number > 1:
                source.leave(name, number, "distributed_type=NO is one process; parallel=ddp: more")
        nodes, ranks = 1, min(ranks, 1)
    if nodes > 1:
        made.values["launch.nodes"] = nodes
    if ranks % max(nodes, 1):
        raise ConfigError(
            f"{source.file}: num_processes={ranks} cannot be divided evenly over "
            f"num_machines={nodes}"
        )
    if cpu:
        made.values["parallel.device"] = "cpu"
    if ranks < 1:
        return None
    made.values["launch.tasks_per_node"] = ranks // nodes
    if not cpu:
        made.values["launch.gpus_per_node"] = ranks // nodes
    return int(ranks)


def _fsdp(source: _Source, made: Translation) -> None:
    source.take(f"{_FSDP}version")
    strategy = source.take(f"{_FSDP}sharding_strategy", _STRATEGIES["full_shard"])
    choice, zero = source.take(f"{_FSDP}reshard_after_forward", strategy)
    offload = source.take(f"{_FSDP}offload_params")
    made.choices["parallel"] = "offload" if offload and choice == "zero3" else choice
    if offload and made.choices["parallel"] not in ("offload", "ddp"):
        made.values["parallel.fsdp.offload"] = True
    if choice == "hsdp" and zero != 3:
        made.values["parallel.zero"] = zero
    if layers := source.take(f"{_FSDP}transformer_layer_cls_to_wrap"):
        names = layers if isinstance(layers, list) else layers.split(",")
        made.values["parallel.blocks"] = [str(name).strip() for name in names]
    if source.take(f"{_FSDP}activation_checkpointing"):
        made.values["train.activation_checkpointing"] = "full"


def _deepspeed_part(
    source: _Source, path: Path, precision: str | None
) -> tuple[dict[str, Any], str]:
    """Return the section as a config of DeepSpeed, or the file that it names in its place."""
    zero: dict[str, Any] = {"stage": source.take(f"{_DS}zero_stage", 2)}
    for part in ("optimizer", "param"):
        zero[f"offload_{part}"] = {"device": source.take(f"{_DS}offload_{part}_device")}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    inner = {"zero_optimization": zero} | {n: source.take(f"{_DS}{n}") for n in names}
    if (named := source.take(f"{_DS}deepspeed_config_file")) is not None:
        places = (Path(named), path.parent / named)
        found = next((place for place in places if place.is_file()), places[0])
        inner, path = load(found), found
    for name in ("fp16", "bf16"):  # Accelerate fills in "auto"
        if named is None or inner.get(name, {}).get("enabled") == "auto":
            inner[name] = inner.get(name, {}) | {"enabled": precision == name}
    if precision == "fp8":
        source.leave("mixed_precision", "fp8", "precision.compute=fp8 computes in float8")
    return inner, str(path)


def _known(name: str) -> bool:
    """Return whether the table has the key, or another one of its section."""
    return any(key == name or key.partition(".")[0] == name.partition(".")[0] for key in KEYS)


def _unknown(name: str) -> str:
    near = name not in KEYS and difflib.get_close_matches(name, KEYS, n=1, cutoff=0.8)
    return f"{_NO}{f': did you mean {near[0]}?' if near else ''}"


def _shown(value: Any) -> str:
    """Return a value as it stands in the file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif value != {}:
            yield f"{prefix}{key}", value
