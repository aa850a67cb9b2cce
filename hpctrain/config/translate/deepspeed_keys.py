"""The keys of DeepSpeed: what each is here, or why it has no counterpart."""

from hpctrain.config.translate.foreign_config import Taken

_FORMATS = {
    name: short
    for short, long in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))
    for name in (short, long, f"torch.{long}")
}
_BLOCKS = "!FSDP2 gathers and reduces block by block (parallel.blocks), whatever their size"
_OFFLOAD = {
    **dict.fromkeys(
        (
            *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"),
            *("pipeline", "pipeline_read", "pipeline_write"),
        ),
        "!parallel.fsdp.offload uses the host, not NVMe",
    ),
    "pin_memory": "!offloaded parameters are in pinned memory",
    "ratio": "!all parameters are offloaded, or none",
    "super_offload": "!torch's optimizer updates all parameters on the CPU",
    "cpuadam_cores_perc": "!launch.cpus_per_task gives a rank its cores",
}
_ALSO = "beside MLflow, tracking.also=[{_target_: hpctrain.trackers.%s}] gets the metrics"
_TIMES = "perf/* are in the metrics, `report` sums them up, and train.profile=10-15 records a trace"
_ZERO = {
    "allgather_partitions": "!parameters are always all-gathered",
    "allgather_bucket_size": _BLOCKS,
    "reduce_bucket_size": _BLOCKS,
    "use_multi_rank_bucket_allreduce": _BLOCKS,
    "overlap_comm": "!communication always overlaps with the computation",
    "reduce_scatter": "!gradients are always reduced by reduce-scatter",
    "contiguous_gradients": "!FSDP2 reduces the gradients of a block in one buffer",
    "round_robin_gradients": "FSDP2 divides each parameter evenly over the ranks",
    "load_from_fp32_weights": "!parameters are fp32 unless precision.params says otherwise",
    "elastic_checkpoint": "!every number of ranks loads every checkpoint",
    "ignore_unused_parameters": "!for DDP it is parallel.ddp.find_unused_parameters",
    "legacy_stage1": "there is one implementation of ZeRO-1",
    "sub_group_size": "the optimizer updates all its parameters at once",
    "cpu_offload_use_pin_memory": "!offloaded parameters are in pinned memory",
    "stage3_max_live_parameters": "!parameters live as long as their block is computed",
    "stage3_max_reuse_distance": "!parameters live as long as their block is computed",
    "stage3_prefetch_bucket_size": "!parallel.fsdp.prefetch counts blocks, not elements",
    "stage3_param_persistence_threshold": "!small parameters are divided, too",
    "stage3_model_persistence_threshold": "!small parameters are divided, too",
    "stage3_gather_16bit_weights_on_model_save": "checkpoints are sharded, and any layout loads "
    "them",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints are sharded, and any layout loads "
    "them",
    "stage3_module_granularity_threshold": "parallel.blocks names the blocks",
    "stage3_use_all_reduce_for_fetch_params": "parameters are always all-gathered",
    "stage3_allgather_sequential": "FSDP2 gathers a block at a time",
    "stage3_partition_stream_chunk_size": "FSDP2 fills the parameters where they are divided",
    "leaf_module": "parallel.blocks names the modules that are gathered as a whole",
    "zero_quantized_weights": "weights are not quantized for communication",
    "zero_quantized_nontrainable_weights": "weights are not quantized for communication",
    "zero_quantized_gradients": "only DDP compresses gradients (train.compression.kind=int8); "
    "precision.reduce=bf16 halves them",
    "zeropp_loco_param": "train.compression.kind=int8 has no memory of errors",
    "mics_hierarchical_params_gather": "NCCL chooses how it gathers",
    "memory_efficient_linear": "!torch's own linear layers are used",
    "pipeline_loading_checkpoint": "each rank reads only its own part of a checkpoint",
    "override_module_apply": "!modules are not patched",
    "zenflow": "updates are never asynchronous",
    "log_trace_cache_warnings": "there is no such cache",
    "enable_sanity_checks": "site.env.TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives",
    "save_muon_momentum_buffer_in_memory": "there is no offload to NVMe",
}
WARMUP = "the warm-up is linear"
_RARELY = "metrics would not be tracked either (train.log_every)"
_NEAR_0 = "the warm-up begins near 0"
_STAGE_3 = "it belongs to stage 3"
_LOSS_SCALE = "the loss scale begins at 2^16, and doubles after 2000 steps without an overflow"
_OF_OPTIMIZER = "!it belongs to the optimizer: see optimizer.options"
_DEVICES = {name: name for name in ("none", "cpu", "nvme")}
OPTIONS = (  # of torch's optimizers
    *("betas", "eps", "momentum", "nesterov", "dampening", "amsgrad", "alpha", "lr_decay"),
    *("maximize", "foreach", "fused", "capturable"),
)
KEYS: dict[str, Taken | str] = {
    "zero_optimization.stage": Taken({n: n for n in range(4)}, default=0),
    **{
        f"zero_optimization.offload_{part}.device": Taken(_DEVICES, default="none")
        for part in ("param", "optimizer")
    },
    **dict.fromkeys(
        (
            *("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
            *("torch_autocast.enabled", "flops_profiler.enabled"),
            *("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
        ),
        Taken(),
    ),
    **dict.fromkeys(("optimizer.type", "scheduler.type"), Taken(str)),
    "zero_optimization.zero_hpz_partition_size": Taken(float, default=1, reason=_STAGE_3),
    "zero_optimization.mics_shard_size": Taken(float, default=-1, reason=_STAGE_3),
    "fp16.enabled": Taken(ours="precision.compute=fp16 or fp32"),
    "bf16.enabled": Taken(ours="precision.compute=bf16 or fp32"),
    "torch_autocast.dtype": Taken(_FORMATS, default="bf16"),
    "fp16.loss_scale": Taken(default=0, reason=_LOSS_SCALE),
    "fp16.initial_scale_power": Taken(default=16, reason=_LOSS_SCALE),
    "fp16.loss_scale_window": Taken(default=2000, reason=_LOSS_SCALE),
    "bf16.bf16_master_weights_and_grads": Taken(
        lambda on: "bf16" if on else None, "precision.params", sets=True
    ),
    "communication_data_type": Taken(_FORMATS, "precision.reduce", sets=True),
    "fp32_allreduce": Taken(lambda on: "fp32" if on else None, "precision.reduce", sets=True),
    "data_types.grad_accum_dtype": Taken(
        _FORMATS, reason="gradients have the format of precision.params"
    ),
    "train_batch_size": Taken(float, "train.global_batch_size"),
    "train_micro_batch_size_per_gpu": Taken(float, "train.accumulate"),
    "gradient_accumulation_steps": Taken(float, "train.accumulate"),
    "gradient_clipping": Taken(float, "train.clip_norm"),
    "steps_per_print": Taken(float, "train.log_every", reason=_RARELY),
    "flops_profiler.profile_step": Taken(float, default=1),
    "tensor_parallel.autotp_size": Taken(float, "parallel.tp"),
    "dataloader_drop_last": Taken(lambda on: "drop" if on else "pad", "data.tail", sets=True),
    "optimizer.params.lr": Taken(float, "optimizer.lr"),
    "optimizer.params.weight_decay": Taken(float, "optimizer.weight_decay"),
    "optimizer.params.max_grad_norm": Taken(float, "train.clip_norm"),
    "optimizer.params.adam_w_mode": Taken(default=True),
    **{
        f"optimizer.params.{name}": Taken(ours="optimizer.options", reason=_OF_OPTIMIZER)
        for name in OPTIONS
    },
    **{
        f"optimizer.params.{name}": _OF_OPTIMIZER
        for name in (
            *("freeze_step", "cuda_aware", "comm_backend_name", "max_coeff", "min_coeff"),
            *("coeff_beta", "var_freeze_step", "var_update_scaler", "local_step_scaler"),
            *("local_step_clipper", "factor_max", "factor_min", "factor_threshold", "ns_steps"),
            *("muon_lr", "adam_lr"),
        )
    },
    "scheduler.params.warmup_num_steps": Taken(float, "scheduler.warmup_steps"),
    "scheduler.params.warmup_max_lr": Taken(float, "optimizer.lr"),
    "scheduler.params.total_num_steps": Taken(float, "train.max_steps"),
    "scheduler.params.cos_min_ratio": Taken(float, "scheduler.final_ratio", 1e-4),
    "scheduler.params.warmup_type": Taken(default="log", reason=WARMUP),
    "scheduler.params.warmup_min_lr": Taken(float, default=0, reason=_NEAR_0),
    "scheduler.params.warmup_min_ratio": Taken(float, default=0, reason=_NEAR_0),
    "scheduler.params.cycle_first_step_size": Taken(float, default=2000),
    **{
        f"scheduler.params.cycle_{name}": Taken(float)
        for name in ("min_lr", "max_lr", "second_step_size")
    },
    **{
        f"scheduler.params.{name}": "!it belongs to that scheduler"
        for name in (
            *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
            *("lr_range_test_staircase", "decay_lr_rate", "cycle_first_stair_count"),
            *("cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom"),
            *("cycle_max_mom", "decay_mom_rate"),
        )
    },
    **{f"zero_optimization.{name}": reason for name, reason in _ZERO.items()},
    # DeepSpeed takes these names without the prefix, too.
    **{
        f"zero_optimization.{name.removeprefix('stage3_')}": reason
        for name, reason in _ZERO.items()
    },
    **{
        f"zero_optimization.offload_{part}.{name}": reason
        for part in ("param", "optimizer")
        for name, reason in _OFFLOAD.items()
    },
    "tensorboard": _ALSO % "TensorBoard",
    "wandb": _ALSO % "WeightsAndBiases",
    **dict.fromkeys(("csv_monitor", "comet", "monitor_config"), _ALSO % "OtherTracker"),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "timers"), _TIMES),
    "flops_profiler": "train.profile records a trace, and perf/mfu counts the FLOPs of the model",
    "torch_autocast.lower_precision_safe_modules": "!torch's autocast chooses",
    "bf16.bf16_optimizer_states": "!they have the format of precision.params",
    "bf16.immediate_grad_update": "!FSDP2 reduces a gradient as soon as it is there",
    "bf16.check_grad_overflow": "!train.nonfinite says what a norm that is not finite does",
    "data_types.param_dtype": "!precision.params is the format of the parameters",
    "data_types.buffer_dtype": "!precision.params is the format of the parameters",
    **dict.fromkeys(
        ("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
        "!each overflow halves the loss scale",
    ),
    "fp16.auto_cast": "!autocast converts the inputs of each operation",
    "fp16.fused_mode": "!torch's optimizers choose (optimizer.options.fused)",
    "fp16.fp16_master_weights_and_grads": "!fp16 parameters would lose small updates",
    "optimizer.legacy_fusion": "!torch's optimizers choose (optimizer.options.fused)",
    "optimizer.params.torch_adam": "!the optimizer is torch's",
    "optimizer.params.bias_correction": "!torch's optimizers always correct the bias",
    "scheduler.params.last_batch_iteration": "!a checkpoint knows its step",
    "comms_logger": "network.debug=INFO shows what NCCL does",
    "log_level": "!there is one level of messages",
    "dump_state": "`python -m hpctrain keys --all` and the frozen config show every value",
    "prescale_gradients": "gradients are divided by the global number of samples",
    "gradient_predivide_factor": "!gradients are divided by the global number of samples",
    "gradient_allreduce_op": "!gradients are divided by the global number of samples",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": "parameters are always all-gathered",
    "managed_gradient_accumulation": "!train.accumulate is always managed",
    "seq_parallel_communication_data_type": "!it belongs to DeepSpeed-Ulysses",
    "seq_parallel_comm_data_type": "!it belongs to DeepSpeed-Ulysses",
    "sequence_parallel_size": "!parallel.cp divides the sequences, in another way",
    "tensor_parallel": "parallel.plan says how a model is divided; many bring a plan",
    "expert_parallel": "parallel.ep divides the experts of hpctrain.models.Transformer",
    "pipeline": "parallel.pp and parallel.pipeline divide the layers of a model",
    "use_data_before_expert_parallelism": "neighbouring ranks divide the experts (parallel.ep)",
    "zero_allow_untested_optimizer": "!every torch optimizer may be used",
    "zero_force_ds_cpu_optimizer": "!offloaded parameters are updated by torch's optimizer",
    "amp": "Apex is not used: set precision.compute=fp16 or bf16",
    "aio": "nothing is offloaded to files",
    "checkpoint": "checkpoints are committed atomically, and every layout loads them",
    "nebula": "checkpoints go to the run directory",
    "datastates": "checkpoints go to the run directory",
    "elasticity": "any number of ranks may resume a run; the global batch size stays",
    "autotuning": "plan --measure tries layouts, and train.micro_batch_size=auto sizes",
    "compile": "train.compile=blocks or model uses torch.compile",
    "graph_harvesting": "CUDA graphs are not recorded",
    "hybrid_engine": "it serves RLHF",
    "vocabulary_size": "!the model has it",
    "sparse_attention": "attention belongs to the model",
    **dict.fromkeys(
        ("data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue"),
        "the model and the order of the data are not changed during a run",
    ),
    **dict.fromkeys(
        ("compression_training", "quantize_training", "weight_quantization"),
        "what is trained is not compressed; train.lora.quantize=nf4 holds frozen weights in 4 bits",
    ),
    **dict.fromkeys(
        (
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.synchronize_checkpoint_boundary",
        ),
        "torch's checkpointing has no such option",
    ),
    "activation_checkpointing.profile": "train.profile records the times and the memory",
    "activation_checkpointing.cpu_checkpointing": "activations are computed again, not offloaded",
    "activation_checkpointing.number_checkpoints": "!train.activation_checkpointing_every chooses "
    "the blocks",
}
NOT_TORCH = {
    "lamb": "torch has no LAMB",
    "lion": "torch has no Lion",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "train.compression.kind=onebit sends gradients of 1 bit for any optimizer, from "
        "train.compression.start_step on (freeze_step), with parallel=ddp",
    ),
    "muadam": "muP needs the model's own learning rates",
    "muadamw": "muP needs the model's own learning rates",
    "musgd": "muP needs the model's own learning rates",
    "muon": "DeepSpeed's Muon uses AdamW for a part of the parameters",
}
