"""Configs of DeepSpeed and Accelerate: one table of keys for both.

    zero_optimization, fsdp_config ── parallel.*   train_batch_size ── train.*   fp16 ── precision.*
    optimizer ── optimizer.*   scheduler ── scheduler.*   num_processes, num_machines ── launch.*

Every other key or value is left, and named in the result: releases add keys, and people add their
own. References: https://www.deepspeed.ai/docs/config-json,
https://huggingface.co/docs/accelerate/package_reference/cli
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpctrain.base.files import yaml_file
from hpctrain.base.files.disk import parse_json
from hpctrain.errors import ConfigError

_NO = "no counterpart (docs/migrate.md, docs/parallel.md)"
_AUTO = "the Hugging Face Trainer fills it in: set it here"
_OFFLOAD = {"none": "", "cpu": "parallel.fsdp.offload=true"}
_FULL = "train.activation_checkpointing=full"
_STRATEGIES = {
    "full_shard": "parallel=zero3",
    "shard_grad_op": "parallel=zero2",
    "no_shard": "parallel=ddp",
    "hybrid_shard": "parallel=hsdp",
    "hybrid_shard_zero2": "parallel=hsdp parallel.zero=2",
}
_NUMBERED = {str(n): overrides for n, overrides in enumerate(_STRATEGIES.values(), 1)}
_OPTIMIZERS = ("AdamW", "Adagrad", "SGD", "RMSprop", "NAdam", "RAdam", "Adadelta")
_DEGREES = "parallelism_config.parallelism_config_"
# Our key that takes the value, or the overrides for each value. A later row has precedence.
KEYS: dict[str, str | dict[str, str]] = {
    "distributed_type": {
        "no": "parallel=single",
        "multi_gpu": "parallel=ddp",
        "multi_cpu": "parallel=ddp parallel.device=cpu",
        "fsdp": "parallel=zero3",
        "deepspeed": "",
    },
    "compute_environment": {"local_machine": ""},
    "use_cpu": {"true": "parallel.device=cpu", "false": ""},
    "zero_optimization.stage": {
        "0": "parallel=ddp",
        **{n: f"parallel=zero{n}" for n in ("1", "2", "3")},
    },
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "fsdp_config.fsdp_version": {"1": "", "2": ""},
    "fsdp_config.fsdp_sharding_strategy": _STRATEGIES | _NUMBERED,
    "fsdp_config.fsdp_reshard_after_forward": {"true": "parallel=zero3", "false": "parallel=zero2"}
    | _STRATEGIES,  # version 1 accepts a strategy here, too
    "fsdp_config.fsdp_offload_params": {"true": "parallel.fsdp.offload=true", "false": ""},
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "parallel.blocks",
    "fsdp_config.fsdp_activation_checkpointing": {"true": _FULL, "false": ""},
    # DeepSpeed checkpoints where the model calls it, which a file cannot show.
    "activation_checkpointing.partition_activations": {"true": _FULL, "false": _FULL},
    "tensor_parallel.autotp_size": "parallel.tp",
    **{f"{_DEGREES}{name}_size": f"parallel.{name}" for name in ("dp_replicate", "dp_shard")},
    **{f"{_DEGREES}{name}_size": f"parallel.{name}" for name in ("cp", "tp")},
    "fp16.enabled": {"true": "precision.compute=fp16", "false": "precision=fp32"},
    "bf16.enabled": {"true": "precision=bf16", "false": ""},
    "mixed_precision": {
        "no": "precision=fp32",
        "bf16": "precision=bf16",
        "fp16": "precision.compute=fp16",
        "fp8": "precision.compute=fp8",
    },
    "communication_data_type": {n: f"precision.reduce={n}" for n in ("fp32", "fp16", "bf16")},
    "dynamo_config.dynamo_backend": {"no": "", "inductor": "train.compile=model"},
    "dynamo_config.dynamo_use_regional_compilation": {"true": "train.compile=blocks", "false": ""},
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_clipping": "train.clip_norm",
    "optimizer.type": {
        "adam": "optimizer._target_=torch.optim.AdamW",  # unless adam_w_mode says otherwise
        **{name.lower(): f"optimizer._target_=torch.optim.{name}" for name in _OPTIMIZERS},
    },
    "optimizer.params.adam_w_mode": {
        "true": "",
        "false": "optimizer._target_=torch.optim.Adam",
    },
    **{f"optimizer.params.{name}": f"optimizer.{name}" for name in ("lr", "weight_decay")},
    **{f"optimizer.params.{n}": f"optimizer.options.{n}" for n in ("betas", "eps", "momentum")},
    "scheduler.type": {
        "none": "scheduler=constant",
        "warmuplr": "scheduler=constant",
        "warmupdecaylr": "scheduler=linear",
        "warmupcosinelr": "scheduler=cosine",
    },
    "scheduler.params.warmup_num_steps": "scheduler.warmup_steps",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.warmup_type": {"linear": ""},
    "scheduler.params.total_num_steps": "train.max_steps",
    "scheduler.params.cos_min_ratio": "scheduler.final_ratio",
}
_PROCESSES = ("num_machines", "num_processes")
_WARMUP = {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.warmup_type": "log"}
# What DeepSpeed takes where a file does not say it, by the key (or its value) that is in the file.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"zero_optimization.stage": 0, "fp16.enabled": False, "gradient_clipping": 0},
    "optimizer.type": {"optimizer.params.weight_decay": 0.0, "scheduler.type": "none"},
    "scheduler.type=WarmupLR": _WARMUP,
    "scheduler.type=WarmupDecayLR": {**_WARMUP, "scheduler.params.warmup_max_lr": 0.001},
    "scheduler.type=WarmupCosineLR": {**_WARMUP, "scheduler.params.cos_min_ratio": 1e-4},
}
# Accelerate's own names for keys of DeepSpeed.
_ALIASES = {
    "deepspeed_config.zero_stage": "zero_optimization.stage",
    **{
        f"deepspeed_config.offload_{part}_device": f"zero_optimization.offload_{part}.device"
        for part in ("optimizer", "param")
    },
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping": "gradient_clipping",
}
_AS: dict[str, Callable[[Any], Any]] = {
    "train.clip_norm": lambda value: value or None,
    "train.micro_batch_size": str,
    "parallel.blocks": lambda names: (
        re.split(r"\s*,\s*", names) if isinstance(names, str) else names
    ),
}


@dataclass
class Translation:
    """What a config becomes."""

    # Of each config group, such as `{"parallel": "zero3"}`.
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # of each dotted key
    # `KEY=VALUE` of the other program without a counterpart, each with the reason.
    left: dict[str, str] = field(default_factory=dict)

    def yaml(self, title: str) -> str:
        """Return the text of a file for conf/experiment."""
        tree: dict[str, Any] = {}
        if self.choices:
            tree["defaults"] = [{f"override /{g}": choice} for g, choice in self.choices.items()]
        for key, value in self.values.items():
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
        lines = ["# @package _global_", f"# {title}"]
        lines += ["# Without a counterpart:"] if self.left else []
        for name, why in self.left.items():  # on one line: another would be a key
            lines.append(f"#   {' '.join(f'{name}: {why}'.split())}")
        text: str = yaml.safe_dump(tree, sort_keys=False)
        return "\n".join([*lines, text])


def load(file: Path) -> dict[str, Any]:
    """Return the content: JSON, in which lines of comments may be, or YAML."""
    found = yaml_file.content(file, parts=0)  # the user has named it, and it may be a link
    if file.suffix == ".json" and len(found) <= yaml_file.LONGEST:
        try:
            text = found.decode("utf-8-sig")
            content = parse_json(re.sub(r"^\s*(//|#).*$", "", text, flags=re.MULTILINE))
        except ValueError as error:
            raise ConfigError(f"{file}: not JSON ({error})") from error
    else:
        texts = ("mixed_precision", "distributed_type", "dynamo_config.dynamo_backend")
        content = yaml_file.parse(found, str(file), dict.fromkeys(texts, "str"))
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a config of DeepSpeed or Accelerate (it has no keys)")
    return content


def translate(content: dict[str, Any], file: Path) -> Translation:
    """Translate a config of one of them; one without any known key is a ConfigError."""
    given = {name: value for name, value in _leaves(content) if value is not None}
    if given and not any(map(_is_known, given)):
        raise ConfigError("\n".join(f"{file}: {name}: {_unknown(name)}" for name in given))
    is_launcher = {"compute_environment", "distributed_type", *_PROCESSES} & {*given}
    given = {_ALIASES.get(name, name): value for name, value in given.items()}
    named, kind = "deepspeed_config.deepspeed_config_file", _shown(given.get("distributed_type"))
    made = Translation()
    if inner := given.pop(named, None):
        made.left[f"{named}={inner}"] = "translate this file, too"
    elif kind.lower() == "deepspeed":
        given = _DEFAULTS[""] | {"zero_optimization.stage": 2} | given
    elif not is_launcher:
        given = _DEFAULTS[""] | given
    for condition, defaults in _DEFAULTS.items():
        key, _, value = condition.partition("=")
        if key in given and value in ("", given[key]):
            given = defaults | given
    micro, parts = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if parts in given or "train_batch_size" not in given:
        reason = f"train.global_batch_size is this x {parts} x the number of ranks"
        _leave(made, {micro: given.pop(micro)} if micro in given else {}, reason)
    for name in KEYS:
        if name in given and given[name] != "auto":
            _take(made, name, given)
    _processes(made, kind.lower() == "no", given)
    _leave(made, given)
    if is_launcher and "train.global_batch_size" not in made.values:
        made.left["batch size"] = (
            "the program sets that of a process; train.global_batch_size is that of all ranks"
        )
    return made


def _take(made: Translation, name: str, given: dict[str, Any]) -> None:
    """Add what a row of the table makes of a value, and take that from what is given."""
    row, value = KEYS[name], given.pop(name)
    if isinstance(row, str):
        made.values[row] = _AS.get(row, lambda same: same)(value)
    elif (shown := _shown(value).lower()) in row:
        for ours, _, text in (one.partition("=") for one in row[shown].split()):
            if "." in ours:
                made.values[ours] = yaml_file.parse(text, ours)
            else:
                made.choices[ours] = text
    else:
        _leave(made, {name: value}, f"{_NO}; known are {', '.join(row)}")
        section = f"{name.partition('.')[0]}.params."
        if name.endswith(".type"):  # its arguments are those of another class
            _leave(made, {key: given.pop(key) for key in [*given] if key.startswith(section)})


def _processes(made: Translation, alone: bool, given: dict[str, Any]) -> None:
    """Translate the number of processes, which Accelerate gives for all nodes together."""
    found = {name: given.pop(name) for name in _PROCESSES if name in given}
    nodes, ranks = found.get("num_machines", 1), found.get("num_processes", 0)
    if alone and (nodes, ranks) not in ((1, 0), (1, 1)):
        _leave(made, found, "distributed_type=NO is one process; parallel=ddp: more")
    elif not (type(nodes) is type(ranks) is int and nodes > 0 and ranks % nodes == 0):
        _leave(made, found, "num_processes must be a multiple of num_machines")
    else:
        made.values |= {"launch.nodes": nodes} if nodes > 1 else {}
        made.values |= {"launch.tasks_per_node": ranks // nodes} if ranks else {}
        if ranks and made.values.get("parallel.device") != "cpu":
            made.values["launch.gpus_per_node"] = ranks // nodes


def _leave(made: Translation, values: Mapping[str, Any], reason: str = "") -> None:
    for name, value in values.items():
        why = reason or (_AUTO if value == "auto" else _unknown(name))
        made.left[f"{name}={_shown(value)}"] = why


def _is_known(name: str) -> bool:
    """Return whether the table has the key, or another one of its section."""
    known = (*KEYS, *_ALIASES, *_PROCESSES, "deepspeed_config.")
    return any(key == name or key.partition(".")[0] == name.partition(".")[0] for key in known)


def _unknown(name: str) -> str:
    near = name not in KEYS and difflib.get_close_matches(name, [*KEYS, *_PROCESSES], 1, 0.8)
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
