"""`python -m hpctrain from-accelerate FILE`: translate a config of Hugging Face Accelerate.

    num_processes, num_machines ── launch.*     mixed_precision ── precision.*
    fsdp_config, deepspeed_config ── parallel.*, train.*     dynamo_config ── train.compile

Reference: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain import yaml_file
from hpctrain.config.translate import deepspeed
from hpctrain.config.translate.foreign_config import ALWAYS, Source
from hpctrain.config.translate.translation import Translation, parser, read, show
from hpctrain.errors import ConfigError

_RANKS = ALWAYS + "each rank learns its place from Slurm or torchrun"
_TPU = ALWAYS + "there are no TPUs"
_HOSTS = "Slurm chooses the nodes"
_REASONS = {
    "machine_rank": _RANKS,
    "main_process_ip": _RANKS,
    "main_process_port": ALWAYS + "jobs choose a free port; MASTER_PORT overrides it",
    "rdzv_backend": _RANKS,
    "rdzv_conf": _RANKS,
    "same_network": ALWAYS + "network.interface chooses the network",
    "main_training_function": ALWAYS + "model, task and data are named by the config",
    "gpu_ids": ALWAYS + "Slurm assigns the GPUs; CUDA_VISIBLE_DEVICES chooses them here",
    "enable_cpu_affinity": "srun binds ranks to cores: see site.cpu_bind",
    "mpirun_config": "ranks are started by srun, not by mpirun",
    "ipex_config": "Intel's extension is not used",
    "fp8_config": "float8 is torchao's, with its own recipe",
    "megatron_lm_config": "Megatron-LM is not used: see `parallel`",
    "tp_config": "parallel.plan says how a model is divided; many bring a plan",
    **dict.fromkeys(
        (
            *("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo"),
            *("command_file", "commands", "tpu_vm", "tpu_env"),
        ),
        _TPU,
    ),
    "fsdp_config.fsdp_auto_wrap_policy": ALWAYS + "blocks are found, or named by parallel.blocks",
    "fsdp_config.fsdp_min_num_params": ALWAYS + "blocks are chosen by class, not by size",
    "fsdp_config.fsdp_backward_prefetch": ALWAYS + "FSDP2 prefetches; see parallel.fsdp.prefetch",
    "fsdp_config.fsdp_state_dict_type": ALWAYS + "checkpoints are sharded, and any layout loads "
    "them",
    "fsdp_config.fsdp_use_orig_params": ALWAYS + "FSDP2 always keeps the original parameters",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ALWAYS + "models are built where they are "
    "divided",
    "fsdp_config.fsdp_sync_module_states": ALWAYS + "all ranks begin with the parameters of rank 0",
    "fsdp_config.fsdp_mixed_precision_policy": "see precision.*",
    "dynamo_config.dynamo_mode": "torch.compile has its default mode",
    "dynamo_config.dynamo_use_fullgraph": "graph breaks are allowed",
    "dynamo_config.dynamo_use_dynamic": "torch finds out which shapes are dynamic",
    "deepspeed_config.deepspeed_multinode_launcher": _RANKS,
    "deepspeed_config.deepspeed_hostfile": _HOSTS,
    "deepspeed_config.deepspeed_exclusion_filter": _HOSTS,
    "deepspeed_config.deepspeed_inclusion_filter": _HOSTS,
    "deepspeed_config.deepspeed_moe_layer_cls_names": "parallel.blocks names what is gathered as "
    "a whole",
    "deepspeed_config.zero3_init_flag": ALWAYS + "models are built where they are divided",
    "deepspeed_config.zero3_save_16bit_model": "checkpoints are sharded, and any layout loads them",
    "deepspeed_config.offload_optimizer_nvme_path": ALWAYS
    + "parallel.fsdp.offload uses the host, not NVMe",
    "deepspeed_config.offload_param_nvme_path": ALWAYS
    + "parallel.fsdp.offload uses the host, not NVMe",
    "parallelism_config.parallelism_config_cp_comm_strategy": ALWAYS + "keys and values are "
    "all-gathered",
    "parallelism_config.parallelism_config_cp_backend": ALWAYS + "it is hpctrain's own",
}
_TEXTS = dict.fromkeys(
    ("mixed_precision", "distributed_type", "dynamo_config.dynamo_backend", "dynamo_backend"), "str"
)
_TYPES = {
    name: name
    for name in ("no", "multi_gpu", "multi_cpu", "fsdp", "deepspeed", "megatron_lm", "tp")
}
_STRATEGIES: dict[Any, tuple[str, int]] = {
    "full_shard": ("zero3", 3),
    "shard_grad_op": ("zero2", 2),
    "no_shard": ("ddp", 3),
    "hybrid_shard": ("hsdp", 3),
    "hybrid_shard_zero2": ("hsdp", 2),
}
_STRATEGIES |= {str(n): value for n, value in enumerate([*_STRATEGIES.values()], 1)}
_STRATEGIES |= {int(n): value for n, value in _STRATEGIES.items() if n.isdigit()}
_RESHARD = {True: ("zero3", 3), False: ("zero2", 2), "true": ("zero3", 3), "false": ("zero2", 2)}


def main(argv: list[str]) -> int:
    """Print the translation of a file."""
    options = parser("from-accelerate", "Hugging Face Accelerate").parse_args(argv)
    show(translate(load(options.file), options.file), options, "Hugging Face Accelerate")
    return 0


def load(file: Path) -> dict[str, Any]:
    """Return the content of a config of Accelerate; what is no YAML with keys is a ConfigError."""
    content = yaml_file.parse(read(file), str(file), _TEXTS)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a config of Accelerate (it has no keys)")
    return content


def translate(content: dict[str, Any], file: Path) -> Translation:
    """Translate a config of Accelerate; an unknown key or value is a ConfigError."""
    content = dict(content)
    if "dynamo_backend" in content:  # older files have this key at the top
        content["dynamo_config"] = {"dynamo_backend": content.pop("dynamo_backend")}
    if content.pop("fp16", False):
        content.setdefault("mixed_precision", "fp16")
    source, made = Source(str(file), content, _REASONS), Translation()
    source.choice("compute_environment", {"local_machine": ""}, "local_machine")
    kind = source.choice("distributed_type", _TYPES, "no")
    gpus = not source.take("use_cpu", False) and kind != "multi_cpu"
    ranks = _ranks(source, made, gpus, alone=kind == "no")
    precision = _precision(source)
    inner, named = _deepspeed(source)
    if kind == "deepspeed" and named is not None:
        places = (Path(named), file.parent / named)
        found = next((place for place in places if place.is_file()), places[0])
        inner = deepspeed.load(found)
        for kind_of in ("fp16", "bf16"):  # Accelerate fills in "auto"
            if precision is not None and inner.get(kind_of, {}).get("enabled") == "auto":
                inner[kind_of] = inner[kind_of] | {"enabled": precision == kind_of}
        made.add(deepspeed.translate(inner, str(found), ranks))
    elif kind == "deepspeed":
        if precision in ("fp16", "bf16"):
            inner[precision] = {"enabled": True}
        made.add(deepspeed.translate(inner, source.file, ranks))
        if precision == "fp8":
            del made.choices["precision"]
            made.values["precision.compute"] = "fp8"
    else:
        if precision == "bf16":
            made.choices["precision"] = "bf16"
        elif precision is not None:
            made.values["precision.compute"] = precision
        _fsdp(source, made, used=kind == "fsdp")
        if kind != "fsdp":
            made.choices["parallel"] = "single" if kind == "no" else "ddp"
    _compile(source, made)
    _degrees(source, made)
    if (
        parts := source.number("gradient_accumulation_steps", None, "train.accumulate")
    ) is not None:
        made.values["train.accumulate"] = parts
    if source.take("debug", False):
        made.values["network.torch_debug"] = "DETAIL"
    made.left |= source.left()
    if "train.global_batch_size" not in made.values:
        made.left["batch size"] = (
            "the program sets that of a process; train.global_batch_size is that of all ranks"
        )
    return made


def _ranks(source: Source, made: Translation, gpus: bool, *, alone: bool) -> int | None:
    """Translate the number of processes; return it, or None if the launcher gives it."""
    nodes = source.number("num_machines", 1)
    ranks: int | None = source.number("num_processes", None)
    if ranks is not None and ranks < 1:
        ranks = None
    if alone:
        for name, number in (("num_processes", ranks), ("num_machines", nodes)):
            if number is not None and number > 1:
                source.drop(name, "distributed_type=NO is one process; parallel=ddp uses more")
        nodes, ranks = 1, ranks and 1
    if nodes > 1:
        made.values["launch.nodes"] = nodes
    if ranks is not None:
        if ranks % nodes:
            raise ConfigError(
                f"{source.file}: num_processes={ranks} cannot be divided evenly over "
                f"num_machines={nodes}"
            )
        made.values["launch.tasks_per_node"] = ranks // nodes
        if gpus:
            made.values["launch.gpus_per_node"] = ranks // nodes
    if not gpus:
        made.values["parallel.device"] = "cpu"
    return ranks


def _precision(source: Source) -> str | None:
    names = {"no": "fp32", False: "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
    precision: str | None = source.choice("mixed_precision", names)
    return precision


def _fsdp(source: Source, made: Translation, *, used: bool) -> None:
    section = "fsdp_config."
    source.number(f"{section}fsdp_version", 1)
    # Version 1 accepts a strategy by this name, too.
    reshard = source.choice(f"{section}fsdp_reshard_after_forward", _RESHARD | _STRATEGIES)
    strategy = source.choice(f"{section}fsdp_sharding_strategy", _STRATEGIES)
    choice, zero = reshard or strategy or ("zero3", 3)
    offload = source.take(f"{section}fsdp_offload_params", False)
    layers = source.take(f"{section}fsdp_transformer_layer_cls_to_wrap")
    prefetch = source.take(f"{section}fsdp_forward_prefetch", False)
    checkpointing = source.take(f"{section}fsdp_activation_checkpointing", False)
    if not used:
        return
    made.choices["parallel"] = "offload" if offload and choice == "zero3" else choice
    if offload and made.choices["parallel"] not in ("offload", "ddp"):
        made.values["parallel.fsdp.offload"] = True
    if choice == "hsdp" and zero != 3:
        made.values["parallel.zero"] = zero
    if layers:
        names = layers if isinstance(layers, list) else str(layers).split(",")
        made.values["parallel.blocks"] = [str(name).strip() for name in names]
    if prefetch:
        made.values["parallel.fsdp.prefetch"] = 1
    if checkpointing:
        made.values["train.activation_checkpointing"] = "full"


def _deepspeed(source: Source) -> tuple[dict[str, Any], str | None]:
    """Return the section as a config of DeepSpeed, and the file that it names in its place."""
    section = "deepspeed_config."
    zero: dict[str, Any] = {"stage": source.number(f"{section}zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = source.take(f"{section}offload_{part}_device")
        if device is not None:
            zero[f"offload_{part}"] = {"device": device}
    parts = source.number(f"{section}gradient_accumulation_steps", None, "train.accumulate")
    clip = source.number(f"{section}gradient_clipping", None, "train.clip_norm")
    inner = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": clip,
    }
    return inner, source.take(f"{section}deepspeed_config_file")


def _compile(source: Source, made: Translation) -> None:
    backend = str(source.take("dynamo_config.dynamo_backend", "no")).lower()
    blocks = source.take("dynamo_config.dynamo_use_regional_compilation", False)
    if backend == "inductor":
        made.values["train.compile"] = "blocks" if blocks else "model"
    elif backend != "no":
        source.drop("dynamo_config.dynamo_backend", "train.compile uses inductor")


def _degrees(source: Source, made: Translation) -> None:
    section = "parallelism_config.parallelism_config_"
    sizes = {
        name: source.number(f"{section}{name}_size", None)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    for name in ("dp_replicate", "dp_shard"):
        if sizes[name] is not None:
            made.values[f"parallel.{name}"] = sizes[name]
    sizes["tp"] = source.number("tp_config.tp_size", sizes["tp"])
    megatron = "megatron_lm_config.megatron_lm_"
    sizes["tp"] = source.number(f"{megatron}tp_degree", sizes["tp"])
    sizes["pp"] = source.number(f"{megatron}pp_degree", None)
    for name in ("tp", "cp", "pp"):
        if sizes[name] not in (None, 1):
            made.values[f"parallel.{name}"] = sizes[name]
    parts = source.number(f"{megatron}num_micro_batches", None)
    if parts is not None:
        made.values["train.accumulate"] = parts
    clip = source.number(f"{megatron}gradient_clipping", None)
    if clip is not None:
        made.values["train.clip_norm"] = clip or None
    sequence = source.take(f"{megatron}sequence_parallelism")
    if sequence is not None and sizes["tp"] not in (None, 1):
        made.values["parallel.sequence_parallel"] = bool(sequence)
    if sizes["sp"] not in (None, 1):
        source.drop(
            f"{section}sp_size",
            "parallel.cp divides sequences, in another way; here its ranks are part of dp_shard",
        )
        made.values["parallel.dp_shard"] = -1
