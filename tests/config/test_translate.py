"""Configs of DeepSpeed and Accelerate, like those in their documentation, are translated."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import plain
from hpctrain.config.schema import Config
from hpctrain.config.translate import accelerate, deepspeed
from hpctrain.config.translate.foreign_config import Source, Taken
from hpctrain.config.translate.translation import Translation, read
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from tests.conftest import make_composer, run_module

Composed = Callable[..., Config]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of configs, as `--config-dir` adds it."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "experiment").mkdir()
    return folder


@pytest.fixture(scope="module")
def with_folder(folder: Path) -> Composer:
    """The composer of a sweep with `--config-dir`."""
    return make_composer(folder)


@pytest.fixture
def composed(folder: Path, with_folder: Composer) -> Composed:
    """Compose a translation in both of its forms, which must give the same valid config."""

    def call(
        made: Translation, *more: str, ranks: int | None = None, base: str = "digits"
    ) -> Config:
        name = f"translated{len(os.listdir(folder / 'experiment'))}"
        (folder / "experiment" / f"{name}.yaml").write_text(made.yaml("Translated"))
        where = ["data.path=/data", "output_dir=/runs"]
        line = shlex.split(shlex.join(made.overrides()))
        first = with_folder.typed([f"experiment={base}", *where, *line, *more])
        second = with_folder.typed([f"experiment=[{base},{name}]", *where, *more])
        assert plain(first) == plain(second)
        validate(first, ranks)
        return first

    return call


# These are from the section "Batch Size Related Parameters" and from the tutorials of DeepSpeed.
GETTING_STARTED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True},
    "zero_optimization": True,
}
CIFAR = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
ZERO_2 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "round_robin_gradients": True,
    },
    "communication_data_type": "fp32",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 1e-6,
            "warmup_max_lr": 2e-5,
            "warmup_num_steps": 100,
            "total_num_steps": 1000,
            "warmup_type": "linear",
        },
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "dataloader_drop_last": False,
}
# The example of ZeRO-3 with offload from the documentation of the Hugging Face Trainer.
TRAINER = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_the_first_example(composed: Composed) -> None:
    made = deepspeed.translate(GETTING_STARTED, "ds.json")
    assert made.left == {}
    config = composed(made)
    assert (config.parallel.dp_shard, config.parallel.zero) == (-1, 1)
    assert config.precision.compute == "fp16"
    assert (config.train.global_batch_size, config.train.accumulate) == (8, 1)
    # DeepSpeed's Adam is AdamW unless adam_w_mode is false. Without the keys for them, DeepSpeed
    # does not clip gradients or change the learning rate.
    assert config.optimizer._target_ == "torch.optim.AdamW"
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (0.00015, 0.0)
    assert config.train.clip_norm is None
    assert config.scheduler.kind == "constant"


def test_the_cifar_tutorial(composed: Composed) -> None:
    made = deepspeed.translate(CIFAR, "ds.json")
    config = composed(made)
    assert (config.parallel.dp_shard, config.train.clip_norm) == (1, 1.0)
    assert config.optimizer.options == {"betas": [0.8, 0.999], "eps": 1e-8}
    assert config.optimizer.weight_decay == 3e-7
    assert (config.scheduler.kind, config.scheduler.warmup_steps) == ("constant", 1000)
    assert config.train.log_every == 2000
    assert made.left["prescale_gradients=false"] == "it is off, and so it is here"
    assert "begins at 2^16" in made.left["fp16.initial_scale_power=15"]
    assert "fp16.loss_scale=0" not in made.left
    assert "always overlaps" in made.left["zero_optimization.overlap_comm=true"]


def test_zero_2_with_offload_and_a_decay(composed: Composed) -> None:
    made = deepspeed.translate(ZERO_2, "ds.json", ranks=4)
    config = composed(made, ranks=4)
    parallel, train = config.parallel, config.train
    assert (parallel.dp_shard, parallel.zero, parallel.fsdp.offload) == (-1, 2, True)
    assert (config.precision.compute, config.precision.reduce) == ("bf16", "fp32")
    assert (train.global_batch_size, train.accumulate, train.max_steps) == (32, 2, 1000)
    assert train.activation_checkpointing == "full"
    assert config.data.tail == "pad"
    assert (config.scheduler.kind, config.scheduler.final_ratio) == ("linear", 0)
    assert (config.scheduler.warmup_steps, config.optimizer.lr) == (100, 2e-5)
    assert made.left["scheduler.params.warmup_min_lr=1e-06"] == "the warm-up begins near 0"
    assert "memory of the host" in made.left["zero_optimization.offload_optimizer.device=cpu"]


def test_what_the_trainer_fills_in(composed: Composed) -> None:
    made = deepspeed.translate(TRAINER, "ds.json")
    config = composed(made)
    assert config.parallel.fsdp.offload
    assert config.optimizer.lr == 3e-3  # the value of the experiment
    assert config.optimizer.weight_decay == 0.01
    assert made.left["train_batch_size=auto"].endswith("set train.global_batch_size")
    assert made.left["fp16.enabled=auto"].endswith("set precision.compute=fp16 or fp32")
    assert "in elements" not in str(made.left)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, {"parallel": "zero3", "precision": "fp32"}),
        ({"zero_optimization": {"stage": 1}}, {"parallel": "zero1"}),
        ({"zero_optimization": {}}, {"parallel": "ddp"}),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
            {"parallel.fsdp.reshard_after_forward": 4},
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
            {"parallel.dp_shard": 4, "parallel.dp_replicate": -1},
        ),
        ({"gradient_clipping": 0}, {"train.clip_norm": None}),
        ({"gradient_clipping": 0.5}, {"train.clip_norm": 0.5}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"precision": "bf16"}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            {"precision.params": "bf16"},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}},
            {"optimizer._target_": "torch.optim.Adam"},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            {"optimizer._target_": "torch.optim.SGD", "optimizer.options": {"momentum": 0.9}},
        ),
        (
            {
                "scheduler.type": "WarmupCosineLR",
                "scheduler.params": {"total_num_steps": 500, "warmup_num_steps": 10},
            },
            {"scheduler": "cosine", "scheduler.final_ratio": 1e-4, "train.max_steps": 500},
        ),
        (
            {
                "scheduler.type": "OneCycle",
                "scheduler.params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
                | {"cycle_first_step_size": 100, "cycle_second_step_size": 300},
            },
            {"scheduler": "one_cycle", "optimizer.lr": 1e-3, "train.max_steps": 400}
            | {"scheduler.rise_fraction": 0.25, "scheduler.initial_ratio": 0.1},
        ),
        ({"flops_profiler": {"enabled": True, "profile_step": 5}}, {"train.profile": "5-5"}),
        ({"fp32_allreduce": True}, {"precision.reduce": "fp32"}),
        ({"steps_per_print": 50}, {"train.log_every": 50}),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
            {"train.global_batch_size": 32, "train.micro_batch_size": "4"},
        ),
    ],
)
def test_single_keys(content: dict[str, Any], expected: dict[str, Any], composed: Composed) -> None:
    made = deepspeed.translate(content, "ds.json")
    found = made.choices | made.values
    assert {name: found.get(name) for name in expected} == expected
    composed(made, ranks=8)


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "optimizer.type=OneBitAdam",
            "train.compression.kind=onebit sends gradients of 1 bit for any optimizer",
        ),
        ({"expert_parallel": {"size": 4}}, "expert_parallel", "parallel.ep divides the experts"),
        ({"pipeline": {"stages": "auto"}}, "pipeline", "parallel.pp and parallel.pipeline divide"),
        # One unknown key does not make the others useless.
        (
            {"gradient_cliping": 1.0, "zero_optimization": {"stage": 2}},
            "gradient_cliping=1.0",
            "there is no such key: did you mean gradient_clipping?",
        ),
        (
            {"steps_per_print": 10, "my_lab": {"owner": "x"}},
            "my_lab.owner=x",
            "there is no such key",
        ),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type=Lamb", "torch has no LAMB"),
        # A key of another optimizer is a key all the same.
        (
            {"optimizer": {"type": "AdamW", "params": {"freeze_step": 4}}},
            "optimizer.params.freeze_step=4",
            "it belongs to the optimizer",
        ),
        (
            {"scheduler": {"type": "LRRangeTest"}},
            "scheduler.type=LRRangeTest",
            "one_cycle, plateau",
        ),
        (
            {"wall_clock_breakdown": True},
            "wall_clock_breakdown=true",
            "train.profile=10-15 records",
        ),
        ({"wandb": {"enabled": True}}, "wandb", "tracking.also=[{_target_: hpctrain.trackers.Wei"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale=128", "begins at"),
        ({"elasticity": {"enabled": True, "max_gpus": 8}}, "elasticity", "any number of ranks"),
        ({"wandb": {"enabled": False, "team": "x"}}, "wandb", "it is off"),
        ({"tensor_parallel": {"tp_grain_size": 8}}, "tensor_parallel", "parallel.plan"),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 5}},
            "zero_optimization.max_live_parameters=5",
            "as long as their block",
        ),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size=8",
            "stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device=nvme",
            "not NVMe",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_micro_batch_size_per_gpu=4",
            "is 4 x gradient_accumulation_steps 2 x the number of ranks: give --ranks N",
        ),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "train_micro_batch_size_per_gpu=4",
            "when there are 4 ranks",
        ),
    ],
)
def test_what_has_no_counterpart_is_named(
    content: dict[str, Any], name: str, reason: str, composed: Composed
) -> None:
    made = deepspeed.translate(content, "ds.json")
    assert reason in made.left[name]
    composed(made)


def test_tensor_parallel_is_taken() -> None:
    made = deepspeed.translate({"tensor_parallel": {"autotp_size": 4}}, "ds.json")
    assert (made.values["parallel.tp"], made.left) == (4, {})
    assert (
        "parallel.tp"
        not in deepspeed.translate({"tensor_parallel": {"autotp_size": 1}}, "ds.json").values
    )


def test_comments(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{\n  // of DeepSpeed\n  "_comment": "x",\n  # hjson\n  "steps_per_print": 1e7\n}'
    )
    made = deepspeed.translate(deepspeed.load(file), "ds.json")
    assert list(made.left) == ["steps_per_print=10000000.0"]


def test_accumulation_follows_from_the_ranks() -> None:
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    assert deepspeed.translate(batch, "ds.json", ranks=2).values["train.accumulate"] == 4
    with pytest.raises(ConfigError, match="train_batch_size 32 is not train_micro_batch_size"):
        deepspeed.translate(batch, "ds.json", ranks=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"zero_optimisation": {"stage": 1}}, "did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stge": 1}}, "did you mean zero_optimization.stage?"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: there is no such key: did you mean"),
        ({"xyz": 1}, "ds.json: xyz: there is no such key"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4: allowed are 0, 1, 2, 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"train_batch_size": "8"}, "train_batch_size=8: it must be a number"),
        ({"optimizer": {"type": 1.5}}, "optimizer.type=1.5: it must be a text"),
        ({"scheduler": {"type": []}}, "scheduler.type=[]: it must be a text"),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "device=disk: allowed are none, cpu, nvme",
        ),
    ],
)
def test_what_deepspeed_does_not_have(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deepspeed.translate(content, "ds.json")
    assert message in str(caught.value)


# `accelerate config` writes files like these.
PLAIN = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 8080
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer,BertEmbeddings
  fsdp_use_orig_params: true
machine_rank: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 4
use_cpu: false
"""
FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_offload_params: {offload}
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_regional_compilation: {regional}
mixed_precision: fp16
num_machines: 1
num_processes: 8
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fsdp_config: {}
machine_rank: 0
main_process_ip: null
mixed_precision: bf16
num_machines: 2
num_processes: 8
use_cpu: false
"""


def translate(text: str, folder: Path) -> Translation:
    file = folder / "accelerate.yaml"
    file.write_text(text)
    return accelerate.translate(accelerate.load(file), file)


def test_multi_gpu(composed: Composed, tmp_path: Path) -> None:
    made = translate(PLAIN, tmp_path)
    config = composed(made)
    launch = config.launch
    assert (launch.nodes, launch.tasks_per_node, launch.gpus_per_node) == (2, 4, 4)
    assert (config.precision.compute, config.parallel.dp_shard) == ("bf16", 1)
    assert "free port" in made.left["main_process_port=8080"]
    assert "cpu-bind" not in made.left["enable_cpu_affinity=false"]  # the key is off
    assert "all ranks" in made.left["batch size"]


def test_fsdp(composed: Composed, tmp_path: Path) -> None:
    config = composed(translate(FSDP, tmp_path))
    assert (config.parallel.dp_shard, config.parallel.zero) == (-1, 3)
    assert config.parallel.blocks == ["BertLayer", "BertEmbeddings"]
    assert config.train.activation_checkpointing == "full"
    assert config.precision.compute == "fp32"


@pytest.mark.parametrize(
    ("strategy", "choice", "zero"),
    [
        ("FULL_SHARD", "zero3", 3),
        ("SHARD_GRAD_OP", "zero2", 2),
        ("NO_SHARD", "ddp", 3),
        ("HYBRID_SHARD", "hsdp", 3),
        ("HYBRID_SHARD_ZERO2", "hsdp", 2),
        ("2", "zero2", 2),
    ],
)
def test_sharding_strategies(
    strategy: str, choice: str, zero: int, composed: Composed, tmp_path: Path
) -> None:
    made = translate(FSDP.replace("FULL_SHARD", strategy), tmp_path)
    assert made.choices["parallel"] == choice
    assert composed(made).parallel.zero == zero


@pytest.mark.parametrize(
    ("reshard", "offload", "choice"),
    [("true", "false", "zero3"), ("false", "false", "zero2"), ("true", "true", "offload")],
)
def test_fsdp_2_and_compile(
    reshard: str, offload: str, choice: str, composed: Composed, tmp_path: Path
) -> None:
    text = FSDP2.format(reshard=reshard, offload=offload, regional=reshard)
    made = translate(text, tmp_path)
    config = composed(made)
    assert made.choices["parallel"] == choice
    assert config.train.compile == ("blocks" if reshard == "true" else "model")
    assert config.precision.compute == "fp16"
    assert config.parallel.fsdp.offload == (offload == "true")


def test_deepspeed_through_accelerate(composed: Composed, tmp_path: Path) -> None:
    config = composed(translate(DEEPSPEED, tmp_path))
    assert (config.parallel.zero, config.train.accumulate, config.train.clip_norm) == (3, 4, 1.0)
    assert config.precision.compute == "bf16"
    config = composed(translate(DEEPSPEED.replace("  gradient_clipping: 1.0\n", ""), tmp_path))
    assert config.train.clip_norm is None
    automatic = ZERO_2 | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(automatic))
    named = {
        "mixed_precision": "fp16",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False},
        "num_processes": 4,
    }
    config = composed(translate(yaml.safe_dump(named), tmp_path))
    assert (config.parallel.zero, config.train.global_batch_size) == (2, 32)
    assert config.precision.compute == "fp16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: 'NO'\nuse_cpu: true", {"parallel": "single", "parallel.device": "cpu"}),
        (
            "distributed_type: MULTI_CPU\nnum_processes: 4",
            {"parallel": "ddp", "parallel.device": "cpu", "launch.tasks_per_node": 4},
        ),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8", {"precision.compute": "fp8"}),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
            "parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 1}",
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 4},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
            "parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}",
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.tp": 2},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 2, "
            "parallelism_config_cp_size: 4, parallelism_config_sp_size: 1}",
            {"parallel.dp_shard": 2, "parallel.cp": 4, "launch.tasks_per_node": 8},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 4, "
            "parallelism_config_sp_size: 2}",
            {"parallel.dp_shard": -1, "parallel.cp": None},
        ),
        (
            "distributed_type: TP\nnum_processes: 2\ntp_config: {tp_size: 2}",
            {"parallel": "ddp", "parallel.tp": 2},
        ),
        (
            "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: "
            "{megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, "
            "megatron_lm_num_micro_batches: 4, megatron_lm_sequence_parallelism: false, "
            "megatron_lm_gradient_clipping: 0.5}",
            {
                "parallel": "ddp",
                "parallel.tp": 2,
                "parallel.pp": 2,
                "train.accumulate": 4,
                "parallel.sequence_parallel": False,
                "train.clip_norm": 0.5,
            },
        ),
        # Accelerate starts one process then.
        (
            "distributed_type: 'NO'\nnum_processes: 8\nnum_machines: 2",
            {"parallel": "single", "launch.tasks_per_node": 1, "launch.nodes": None},
        ),
        ("distributed_type: MULTI_GPU\ngradient_accumulation_steps: 2", {"train.accumulate": 2}),
    ],
)
def test_other_keys(
    text: str, expected: dict[str, Any], composed: Composed, tmp_path: Path
) -> None:
    made = translate(text, tmp_path)
    found = made.choices | made.values
    assert {name: found.get(name) for name in expected} == expected
    # The model of the digits cannot be divided.
    base = () if {"parallel.tp", "parallel.pp", "parallel.cp"}.isdisjoint(found) else _LANGUAGE
    composed(made, *base, base="stdlib_lm" if base else "digits")


_LANGUAGE = ("model.tied=false", "data.windows.length=129", "train.global_batch_size=16")


def test_what_accelerate_has_and_we_have_not_is_named(tmp_path: Path) -> None:
    alone = translate("distributed_type: 'NO'\nnum_processes: 8\nnew_key: 1", tmp_path)
    assert alone.left["num_processes=8"].startswith("distributed_type=NO is one process")
    assert alone.left["new_key=1"] == "there is no such key"
    inner = translate("distributed_type: FSDP\nfsdp_config: {fsdp_shardin_strategy: X}", tmp_path)
    hint = inner.left["fsdp_config.fsdp_shardin_strategy=X"]
    assert hint.endswith("did you mean fsdp_config.fsdp_sharding_strategy?")
    parts = "distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}"
    (reason,) = [r for n, r in translate(parts, tmp_path).left.items() if "sp_size" in n]
    assert "parallel.cp divides sequences" in reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: XLA", "distributed_type=XLA: allowed are NO, MULTI_GPU, "),
        ("compute_environment: AMAZON_SAGEMAKER", "allowed are LOCAL_MACHINE"),
        ("num_process: 4", "accelerate.yaml: num_process: there is no such key: did you mean num_"),
        ("distributed_type: FSDP\nnum_machines: 3\nnum_processes: 4", "cannot be divided evenly"),
        ("just a text", "it has no keys"),
        ("a: [", "not YAML"),
    ],
)
def test_what_accelerate_does_not_have(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(text, tmp_path)
    assert message in str(caught.value)


def test_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO_2))
    shown = run_module("hpctrain", "from-deepspeed", str(file), "--ranks", "4").stdout
    assert shown.startswith(
        "# @package _global_\n# Translated from ds.json, a config of DeepSpeed\n"
    )
    assert "#   zero_optimization.round_robin_gradients=true: FSDP2 divides" in shown
    assert yaml.safe_load(shown)["train"]["global_batch_size"] == 32
    line = run_module("hpctrain", "from-deepspeed", str(file), "--overrides")
    assert "parallel=zero2" in shlex.split(line.stdout)
    assert "without a counterpart: zero_optimization.round_robin_gradients=true" in line.stderr
    file.write_text(PLAIN)
    assert "nodes: 2" in run_module("hpctrain", "from-accelerate", str(file)).stdout
    assert "not JSON" in run_module("hpctrain", "from-deepspeed", str(file), code=2).stderr
    missing = run_module("hpctrain", "from-accelerate", str(tmp_path / "no.yaml"), code=2).stderr
    assert "cannot be read (No such file or directory)" in missing
    listed = run_module("hpctrain", "--help").stdout
    assert "from-deepspeed FILE" in listed
    assert "from-accelerate FILE" in listed


def test_a_list_or_section_in_place_of_a_choice_is_refused(tmp_path: Path) -> None:
    row = Taken({"a": 1, "b": 2})
    source = Source("a.yaml", {"kind": [1], "other": [{}]}, {"kind": row, "other": row})
    for name in ("kind", "other"):
        with pytest.raises(ConfigError, match="allowed are a, b"):
            source.take(name)


def test_a_file_to_translate_is_a_regular_one_of_at_most_a_mebibyte(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        read(tmp_path / "fifo")
    (tmp_path / "long").write_text(" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="longer than"):
        read(tmp_path / "long")
    (tmp_path / "link").symlink_to("mine")  # the user has named it
    (tmp_path / "mine").write_text("{}")
    assert read(tmp_path / "link") == "{}"
