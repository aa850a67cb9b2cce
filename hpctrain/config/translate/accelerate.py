"""`python -m hpctrain from-accelerate FILE`: translate a config of Hugging Face Accelerate.

    num_processes, num_machines ── launch.*     mixed_precision ── precision.*
    fsdp_config, deepspeed_config ── parallel.*, train.*     dynamo_config ── train.compile

Reference: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from pathlib import Path
from typing import Any

from hpctrain import yaml_file
from hpctrain.config.translate import deepspeed
from hpctrain.config.translate.foreign_config import Source, Taken
from hpctrain.config.translate.translation import Translation, parser, read, show
from hpctrain.errors import ConfigError

_RANKS = "!each rank learns its place from Slurm or torchrun"
_TPU = "!there are no TPUs"
_NVME = "!parallel.fsdp.offload uses the host, not NVMe"
_HOSTS = "Slurm chooses the nodes"
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
_DEGREES = "parallelism_config.parallelism_config_"
_MEGATRON = "megatron_lm_config.megatron_lm_"
_TP = (f"{_MEGATRON}tp_degree", "tp_config.tp_size", f"{_DEGREES}tp_size")  # the first decides
KEYS: dict[str, Taken | str] = {
    **dict.fromkeys(
        (
            *("use_cpu", "dynamo_config.dynamo_use_regional_compilation"),
            *("fsdp_config.fsdp_offload_params", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
            *("fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_activation_checkpointing"),
            *("deepspeed_config.deepspeed_config_file", f"{_MEGATRON}sequence_parallelism"),
            *(f"deepspeed_config.offload_{part}_device" for part in ("optimizer", "param")),
        ),
        Taken(),
    ),
    "compute_environment": Taken({"local_machine": ""}, default=""),
    "distributed_type": Taken(_TYPES, default="no"),
    "num_machines": Taken(float, default=1),
    "num_processes": Taken(float),
    "mixed_precision": Taken(
        {"no": "fp32", False: "fp32"} | {n: n for n in ("fp16", "bf16", "fp8")}
    ),
    "debug": "site.env.TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives of all ranks",
    "fsdp_config.fsdp_version": Taken(float),
    # Version 1 accepts a strategy by this name, too.
    "fsdp_config.fsdp_reshard_after_forward": Taken(_RESHARD | _STRATEGIES),
    "fsdp_config.fsdp_sharding_strategy": Taken(_STRATEGIES, default=("zero3", 3)),
    "deepspeed_config.zero_stage": Taken(float, default=2),
    "deepspeed_config.gradient_accumulation_steps": Taken(float, "train.accumulate"),
    "deepspeed_config.gradient_clipping": Taken(float, "train.clip_norm"),
    "dynamo_config.dynamo_backend": Taken(
        lambda name: str(name).lower(), default="no", reason="train.compile uses inductor"
    ),
    **{f"{_DEGREES}{n}_size": Taken(float) for n in ("dp_replicate", "dp_shard", "cp")},
    f"{_DEGREES}sp_size": Taken(
        float,
        reason="parallel.cp divides sequences, in another way; here its ranks are part of dp_shard",
    ),
    **dict.fromkeys(_TP, Taken(float, "parallel.tp")),
    f"{_MEGATRON}pp_degree": Taken(float, "parallel.pp"),
    f"{_MEGATRON}gradient_clipping": Taken(float, "train.clip_norm"),
    f"{_MEGATRON}num_micro_batches": Taken(float, "train.accumulate", sets=True),
    "gradient_accumulation_steps": Taken(float, "train.accumulate", sets=True),
    "machine_rank": _RANKS,
    "main_process_ip": _RANKS,
    "main_process_port": "!jobs choose a free port; MASTER_PORT overrides it",
    "rdzv_backend": _RANKS,
    "rdzv_conf": _RANKS,
    "same_network": "!network.interface chooses the network",
    "main_training_function": "!model, task and data are named by the config",
    "gpu_ids": "!Slurm assigns the GPUs; CUDA_VISIBLE_DEVICES chooses them here",
    "enable_cpu_affinity": "srun binds ranks to cores: site.srun=[--cpu-bind=cores]",
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
    "fsdp_config.fsdp_auto_wrap_policy": "!blocks are found, or named by parallel.blocks",
    "fsdp_config.fsdp_min_num_params": "!blocks are chosen by class, not by size",
    "fsdp_config.fsdp_backward_prefetch": "!FSDP2 prefetches; see parallel.fsdp.prefetch",
    "fsdp_config.fsdp_state_dict_type": "!checkpoints are sharded, and any layout loads them",
    "fsdp_config.fsdp_use_orig_params": "!FSDP2 always keeps the original parameters",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "!models are built where they are divided",
    "fsdp_config.fsdp_sync_module_states": "!all ranks begin with the parameters of rank 0",
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
    "deepspeed_config.zero3_init_flag": "!models are built where they are divided",
    "deepspeed_config.zero3_save_16bit_model": "checkpoints are sharded, and any layout loads them",
    "deepspeed_config.offload_optimizer_nvme_path": _NVME,
    "deepspeed_config.offload_param_nvme_path": _NVME,
    "parallelism_config.parallelism_config_cp_comm_strategy": "!keys and values are all-gathered",
    "parallelism_config.parallelism_config_cp_backend": "!it is hpctrain's own",
}


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
    source, made = Source(str(file), content, KEYS), Translation()
    source.take("compute_environment")
    kind, precision = source.take("distributed_type"), source.take("mixed_precision")
    gpus = not source.take("use_cpu") and kind != "multi_cpu"
    ranks = _ranks(source, made, gpus, alone=kind == "no")
    inner, named = _deepspeed(source)
    if kind == "deepspeed":
        where = str(file)
        if named is not None:
            places = (Path(named), file.parent / named)
            found = next((place for place in places if place.is_file()), places[0])
            inner, where = deepspeed.load(found), str(found)
            for name in ("fp16", "bf16"):  # Accelerate fills in "auto"
                if precision is not None and inner.get(name, {}).get("enabled") == "auto":
                    inner[name] = inner[name] | {"enabled": precision == name}
        elif precision in ("fp16", "bf16"):
            inner[precision] = {"enabled": True}
        made.add(deepspeed.translate(inner, where, ranks))
        if precision == "fp8" and named is None:
            del made.choices["precision"]
            made.values["precision.compute"] = "fp8"
    else:
        if precision == "bf16":
            made.choices["precision"] = "bf16"
        elif precision is not None:
            made.values["precision.compute"] = precision
        fsdp = _fsdp(source)
        if kind == "fsdp":
            made.add(fsdp)
        else:
            made.choices["parallel"] = "single" if kind == "no" else "ddp"
    _compile(source, made)
    _degrees(source, made)
    source.put_into(made)
    if "train.global_batch_size" not in made.values:
        made.left["batch size"] = (
            "the program sets that of a process; train.global_batch_size is that of all ranks"
        )
    return made


def _ranks(source: Source, made: Translation, gpus: bool, *, alone: bool) -> int | None:
    """Translate the number of processes; return it, or None if the launcher gives it."""
    nodes = source.take("num_machines")
    ranks: int | None = source.take("num_processes")
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


def _fsdp(source: Source) -> Translation:
    """Return what the section becomes, if FSDP is used."""
    made, section = Translation(), "fsdp_config.fsdp_"
    source.take(f"{section}version")
    reshard, strategy, offload, layers, prefetch, checkpointing = (
        source.take(f"{section}{name}")
        for name in (
            *("reshard_after_forward", "sharding_strategy", "offload_params"),
            *("transformer_layer_cls_to_wrap", "forward_prefetch", "activation_checkpointing"),
        )
    )
    choice, zero = reshard or strategy
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
    return made


def _deepspeed(source: Source) -> tuple[dict[str, Any], str | None]:
    """Return the section as a config of DeepSpeed, and the file that it names in its place."""
    section = "deepspeed_config."
    zero: dict[str, Any] = {"stage": source.take(f"{section}zero_stage")}
    for part in ("optimizer", "param"):
        if (device := source.take(f"{section}offload_{part}_device")) is not None:
            zero[f"offload_{part}"] = {"device": device}
    names = ("gradient_accumulation_steps", "gradient_clipping")
    inner = {"zero_optimization": zero} | {n: source.take(f"{section}{n}") for n in names}
    return inner, source.take(f"{section}deepspeed_config_file")


def _compile(source: Source, made: Translation) -> None:
    backend = source.take("dynamo_config.dynamo_backend")
    blocks = source.take("dynamo_config.dynamo_use_regional_compilation")
    if backend == "inductor":
        made.values["train.compile"] = "blocks" if blocks else "model"
    elif backend != "no":
        source.drop("dynamo_config.dynamo_backend")


def _degrees(source: Source, made: Translation) -> None:
    tp = next((n for n in [source.take(name) for name in _TP] if n is not None), None)
    sizes = {n: source.take(f"{_DEGREES}{n}_size") for n in ("dp_replicate", "dp_shard", "cp")}
    for name, size in (sizes | {"tp": tp, "pp": source.take(f"{_MEGATRON}pp_degree")}).items():
        if size is not None and (size != 1 or name.startswith("dp")):
            made.values[f"parallel.{name}"] = size
    if (clip := source.take(f"{_MEGATRON}gradient_clipping")) is not None:
        made.values["train.clip_norm"] = clip or None
    sequence = source.take(f"{_MEGATRON}sequence_parallelism")
    if sequence is not None and tp not in (None, 1):
        made.values["parallel.sequence_parallel"] = bool(sequence)
    if source.take(f"{_DEGREES}sp_size") not in (None, 1):
        source.drop(f"{_DEGREES}sp_size")
        made.values["parallel.dp_shard"] = -1
