"""The keys of DeepSpeed without a counterpart here, and why they have none."""

from hpctrain.config.translate.foreign_config import ALWAYS

_BLOCKS = ALWAYS + "FSDP2 gathers and reduces block by block (parallel.blocks), whatever their size"
_OFFLOAD = {
    **dict.fromkeys(
        (
            *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"),
            *("pipeline", "pipeline_read", "pipeline_write"),
        ),
        ALWAYS + "parallel.fsdp.offload uses the host, not NVMe",
    ),
    "pin_memory": ALWAYS + "offloaded parameters are in pinned memory",
    "ratio": ALWAYS + "all parameters are offloaded, or none",
    "super_offload": ALWAYS + "torch's optimizer updates all parameters on the CPU",
    "cpuadam_cores_perc": ALWAYS + "launch.cpus_per_task gives a rank its cores",
}
_ALSO = "beside MLflow, tracking.also=[{_target_: hpctrain.trackers.%s}] gets the metrics"
_TIMES = "perf/* are in the metrics, `report` sums them up, and train.profile=10-15 records a trace"
_ZERO = {
    "allgather_partitions": ALWAYS + "parameters are always all-gathered",
    "allgather_bucket_size": _BLOCKS,
    "reduce_bucket_size": _BLOCKS,
    "use_multi_rank_bucket_allreduce": _BLOCKS,
    "overlap_comm": ALWAYS + "communication always overlaps with the computation",
    "reduce_scatter": ALWAYS + "gradients are always reduced by reduce-scatter",
    "contiguous_gradients": ALWAYS + "FSDP2 reduces the gradients of a block in one buffer",
    "round_robin_gradients": "FSDP2 divides each parameter evenly over the ranks",
    "load_from_fp32_weights": ALWAYS + "parameters are fp32 unless precision.params says otherwise",
    "elastic_checkpoint": ALWAYS + "every number of ranks loads every checkpoint",
    "ignore_unused_parameters": ALWAYS + "for DDP it is parallel.ddp.find_unused_parameters",
    "legacy_stage1": "there is one implementation of ZeRO-1",
    "sub_group_size": "the optimizer updates all its parameters at once",
    "cpu_offload_use_pin_memory": ALWAYS + "offloaded parameters are in pinned memory",
    "stage3_max_live_parameters": ALWAYS + "parameters live as long as their block is computed",
    "stage3_max_reuse_distance": ALWAYS + "parameters live as long as their block is computed",
    "stage3_prefetch_bucket_size": ALWAYS + "parallel.fsdp.prefetch counts blocks, not elements",
    "stage3_param_persistence_threshold": ALWAYS + "small parameters are divided, too",
    "stage3_model_persistence_threshold": ALWAYS + "small parameters are divided, too",
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
    "memory_efficient_linear": ALWAYS + "torch's own linear layers are used",
    "pipeline_loading_checkpoint": "each rank reads only its own part of a checkpoint",
    "override_module_apply": ALWAYS + "modules are not patched",
    "zenflow": "updates are never asynchronous",
    "log_trace_cache_warnings": "there is no such cache",
    "enable_sanity_checks": "network.torch_debug=DETAIL compares the collectives of all ranks",
    "save_muon_momentum_buffer_in_memory": "there is no offload to NVMe",
}
REASONS = {
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
    "torch_autocast.lower_precision_safe_modules": ALWAYS + "torch's autocast chooses",
    "bf16.bf16_optimizer_states": ALWAYS + "they have the format of precision.params",
    "bf16.immediate_grad_update": ALWAYS + "FSDP2 reduces a gradient as soon as it is there",
    "bf16.check_grad_overflow": ALWAYS + "train.nonfinite says what a norm that is not finite does",
    "data_types.param_dtype": ALWAYS + "precision.params is the format of the parameters",
    "data_types.buffer_dtype": ALWAYS + "precision.params is the format of the parameters",
    "data_types.grad_accum_dtype": "gradients have the format of precision.params",
    **dict.fromkeys(
        ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"),
        "the loss scale begins at 2^16, and doubles after 2000 steps without an overflow",
    ),
    **dict.fromkeys(
        ("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
        ALWAYS + "each overflow halves the loss scale",
    ),
    "fp16.auto_cast": ALWAYS + "autocast converts the inputs of each operation",
    "fp16.fused_mode": ALWAYS + "torch's optimizers choose (optimizer.options.fused)",
    "fp16.fp16_master_weights_and_grads": ALWAYS + "fp16 parameters would lose small updates",
    "optimizer.legacy_fusion": ALWAYS + "torch's optimizers choose (optimizer.options.fused)",
    "optimizer.params.torch_adam": ALWAYS + "the optimizer is torch's",
    "optimizer.params.bias_correction": ALWAYS + "torch's optimizers always correct the bias",
    "scheduler.params.last_batch_iteration": ALWAYS + "a checkpoint knows its step",
    "scheduler.params.warmup_type": "the warm-up is linear",
    "scheduler.params.warmup_min_lr": "the warm-up begins near 0",
    "scheduler.params.warmup_min_ratio": "the warm-up begins near 0",
    **dict.fromkeys(
        ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
        "it belongs to stage 3",
    ),
    "steps_per_print": "metrics would not be tracked either (train.log_every)",
    "comms_logger": "network.debug=INFO shows what NCCL does",
    "log_level": ALWAYS + "there is one level of messages",
    "dump_state": "`python -m hpctrain keys --all` and the frozen config show every value",
    "prescale_gradients": "gradients are divided by the global number of samples",
    "gradient_predivide_factor": ALWAYS + "gradients are divided by the global number of samples",
    "gradient_allreduce_op": ALWAYS + "gradients are divided by the global number of samples",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": "parameters are always all-gathered",
    "managed_gradient_accumulation": ALWAYS + "train.accumulate is always managed",
    "seq_parallel_communication_data_type": ALWAYS + "it belongs to DeepSpeed-Ulysses",
    "seq_parallel_comm_data_type": ALWAYS + "it belongs to DeepSpeed-Ulysses",
    "sequence_parallel_size": ALWAYS + "parallel.cp divides the sequences, in another way",
    "tensor_parallel": "parallel.plan says how a model is divided; many bring a plan",
    "expert_parallel": "parallel.ep divides the experts of hpctrain.models.Transformer",
    "pipeline": "parallel.pp and parallel.pipeline divide the layers of a model",
    "use_data_before_expert_parallelism": "neighbouring ranks divide the experts (parallel.ep)",
    "zero_allow_untested_optimizer": ALWAYS + "every torch optimizer may be used",
    "zero_force_ds_cpu_optimizer": ALWAYS + "offloaded parameters are updated by torch's optimizer",
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
    "vocabulary_size": ALWAYS + "the model has it",
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
    "activation_checkpointing.number_checkpoints": ALWAYS
    + "train.activation_checkpointing_every chooses the blocks",
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
OPTIONS = (  # of torch's optimizers
    *("betas", "eps", "momentum", "nesterov", "dampening", "amsgrad", "alpha", "lr_decay"),
    *("maximize", "foreach", "fused", "capturable"),
)
OTHER_OPTIMIZERS = (
    *("freeze_step", "cuda_aware", "comm_backend_name", "max_coeff", "min_coeff", "coeff_beta"),
    *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
    *("factor_max", "factor_min", "factor_threshold", "ns_steps", "muon_lr", "adam_lr"),
)
OTHER_SCHEDULERS = (
    *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
    *("lr_range_test_staircase", "decay_lr_rate", "cycle_first_stair_count"),
    *("cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom"),
    *("cycle_max_mom", "decay_mom_rate"),
)
