"""Configs of DeepSpeed and Accelerate, like those in their documentation, are translated."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.insight.translate.foreign import Translation, load, translate
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
    """Compose a translation, which must give a valid config."""

    def call(
        made: Translation, *more: str, ranks: int | None = None, base: str = "digits"
    ) -> Config:
        name = f"translated{len(os.listdir(folder / 'experiment'))}"
        (folder / "experiment" / f"{name}.yaml").write_text(made.yaml("Translated"))
        where = ["data.path=/data", "output_dir=/runs"]
        config = with_folder.typed([f"experiment=[{base},{name}]", *where, *more])
        validate(config, ranks)
        return config

    return call


# From the tutorials of DeepSpeed.
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
# From the example of ZeRO-3 with offload in the documentation of the Hugging Face Trainer.
TRAINER = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


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


def made_of(content: dict[str, Any] | str, folder: Path) -> Translation:
    """Translate a config of DeepSpeed, or the text of one of Accelerate."""
    is_text = isinstance(content, str)
    file = folder / ("accelerate.yaml" if is_text else "ds.json")
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return translate(load(file), file)


def test_zero_2_with_offload_and_a_decay(composed: Composed, tmp_path: Path) -> None:
    made = made_of(ZERO_2, tmp_path)
    config = composed(made, "train.global_batch_size=32", ranks=4)
    parallel, train = config.parallel, config.train
    assert (parallel.dp_shard, parallel.zero, parallel.fsdp.offload) == (-1, 2, True)
    assert (config.precision.compute, config.precision.reduce) == ("bf16", "fp32")
    assert (train.accumulate, train.max_steps) == (2, 1000)
    assert train.activation_checkpointing == "full"
    assert (config.scheduler.kind, config.scheduler.warmup_steps) == ("linear", 100)
    assert config.optimizer.lr == 2e-5
    assert "no counterpart" in made.left["scheduler.params.warmup_min_lr=1e-06"]
    assert "x the number of ranks" in made.left["train_micro_batch_size_per_gpu=4"]


def test_what_the_trainer_fills_in(composed: Composed, tmp_path: Path) -> None:
    made = made_of(TRAINER, tmp_path)
    config = composed(made)
    assert config.parallel.fsdp.offload
    assert config.optimizer.lr == 3e-3  # the value of the experiment
    assert config.optimizer.weight_decay == 0.01
    for name in ("train_batch_size", "fp16.enabled", "optimizer.params.lr", "gradient_clipping"):
        assert made.left[f"{name}=auto"].endswith("fills it in: set it here")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, {"parallel": "zero3", "precision": "fp32"}),
        ({"zero_optimization": {"stage": 0}}, {"parallel": "ddp", "train.clip_norm": None}),
        # DeepSpeed's Adam is AdamW unless adam_w_mode is false.
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}}},
            {
                "optimizer._target_": "torch.optim.AdamW",
                "optimizer.weight_decay": 0.0,
                "optimizer.options.betas": [0.8, 0.999],
            },
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.002}}}
            | {"fp16": {"enabled": True}},
            {
                "scheduler": "constant",
                "scheduler.warmup_steps": 1000,
                "optimizer.lr": 0.002,
                "precision.compute": "fp16",
            },
        ),
        ({"gradient_clipping": 0}, {"train.clip_norm": None}),
        ({"gradient_clipping": 0.5}, {"train.clip_norm": 0.5}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1, "adam_w_mode": False}}},
            {"optimizer._target_": "torch.optim.Adam", "optimizer.lr": 1, "scheduler": "constant"},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            {"optimizer._target_": "torch.optim.SGD", "optimizer.options.momentum": 0.9},
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 500, "warmup_num_steps": 10},
                }
            },
            {"scheduler": "cosine", "scheduler.final_ratio": 1e-4, "train.max_steps": 500},
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
            {"train.global_batch_size": 32, "train.micro_batch_size": "4"},
        ),
        (
            PLAIN,
            {
                "launch.nodes": 2,
                "launch.tasks_per_node": 4,
                "launch.gpus_per_node": 4,
                "precision": "bf16",
                "parallel": "ddp",
            },
        ),
        (
            FSDP,
            {
                "parallel": "zero3",
                "precision": "fp32",
                "launch.tasks_per_node": 4,
                "parallel.blocks": ["BertLayer", "BertEmbeddings"],
                "train.activation_checkpointing": "full",
            },
        ),
        *(
            (FSDP.replace("FULL_SHARD", strategy), {"parallel": choice, "parallel.zero": zero})
            for strategy, choice, zero in (
                *(("SHARD_GRAD_OP", "zero2", None), ("NO_SHARD", "ddp", None)),
                *(("HYBRID_SHARD", "hsdp", None), ("HYBRID_SHARD_ZERO2", "hsdp", 2)),
                ("2", "zero2", None),
            )
        ),
        *(
            (
                "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, "
                f"fsdp_reshard_after_forward: {reshard}, fsdp_offload_params: {offload}}}",
                {"parallel": choice, "parallel.fsdp.offload": offload == "true" or None},
            )
            for reshard, offload, choice in (
                *(("true", "false", "zero3"), ("false", "false", "zero2")),
                ("true", "true", "zero3"),
            )
        ),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
            "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}",
            {"precision.compute": "fp8", "train.compile": "blocks"},
        ),
        (
            DEEPSPEED,
            {"parallel": "zero3", "train.accumulate": 4, "train.clip_norm": 1.0}
            | {"precision": "bf16"},
        ),
        (DEEPSPEED.replace("  gradient_clipping: 1.0\n", ""), {"train.clip_norm": None}),
        ("distributed_type: 'NO'\nuse_cpu: true", {"parallel": "single", "parallel.device": "cpu"}),
        (
            "distributed_type: MULTI_CPU\nnum_processes: 4",
            {"parallel": "ddp", "parallel.device": "cpu", "launch.tasks_per_node": 4},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\n"
            "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
            "parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 1}",
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 4, "parallel.tp": 1},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config: "
            "{parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 4}",
            {"parallel.dp_shard": 2, "parallel.cp": 4, "launch.tasks_per_node": 8},
        ),
        # Accelerate starts one process then.
        (
            "distributed_type: 'NO'\nnum_processes: 8\nnum_machines: 2",
            {"parallel": "single", "launch.tasks_per_node": None, "launch.nodes": None},
        ),
    ],
)
def test_single_keys(
    content: dict[str, Any] | str, expected: dict[str, Any], composed: Composed, tmp_path: Path
) -> None:
    made = made_of(content, tmp_path)
    found = made.choices | made.values
    assert {name: found.get(name) for name in expected} == expected
    # The model of the digits cannot be divided.
    more: tuple[str, ...] = ()
    if divided := not {"parallel.tp", "parallel.pp", "parallel.cp"}.isdisjoint(found):
        more = ("model.tied=false", "data.windows.length=129", "train.global_batch_size=16")
    ranks = None if isinstance(content, str) else 8
    composed(made, *more, ranks=ranks, base="stdlib_lm" if divided else "digits")


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type=OneBitAdam", "known are adam, "),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type=OneCycle", "known are none, "),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params.warmup_type=log", "are linear"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4", "known are 0, 1, 2, 3"),
        ("distributed_type: XLA", "distributed_type=XLA", "known are no, multi_gpu, "),
        (
            "distributed_type: FSDP\nnum_machines: 3\nnum_processes: 4",
            "num_processes=4",
            "multiple of num_machines",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}",
            "deepspeed_config.deepspeed_config_file=ds.json",
            "translate this file, too",
        ),
        (
            {"gradient_cliping": 1.0, "zero_optimization": {"stage": 2}},
            "gradient_cliping=1.0",
            "did you mean gradient_clipping?",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale=128", "no counterpart"),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size=8",
            "no counterpart",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device=nvme",
            "known are none, cpu",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_micro_batch_size_per_gpu=4",
            "is this x gradient_accumulation_steps x the number of ranks",
        ),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "train_micro_batch_size_per_gpu=4",
            "is this x gradient_accumulation_steps x the number of ranks",
        ),
        ("distributed_type: 'NO'\nnum_processes: 8", "num_processes=8", "is one process"),
        ("distributed_type: FSDP\nnew_key: 1", "new_key=1", "no counterpart"),
        (PLAIN, "main_process_port=8080", "no counterpart"),
        (PLAIN, "batch size", "train.global_batch_size is that of all ranks"),
    ],
)
def test_what_has_no_counterpart_is_named(
    content: dict[str, Any] | str, name: str, reason: str, composed: Composed, tmp_path: Path
) -> None:
    made = made_of(content, tmp_path)
    assert reason in made.left[name]
    composed(made)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"zero_optimisation": {"stage": 1}}, "did you mean zero_optimization.stage?"),
        ({"xyz": 1}, "ds.json: xyz: no counterpart"),
        ("num_process: 4", "accelerate.yaml: num_process: no counterpart"),
        ("- 1", "it has no keys"),
    ],
)
def test_what_they_do_not_have(content: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        made_of(content, tmp_path)
    assert message in str(caught.value)


def test_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    text = json.dumps(ZERO_2)
    file.write_text(text.replace("{", "{\n  // of DeepSpeed\n  # hjson\n", 1))
    shown = run_module("hpctrain.insight.translate", str(file)).stdout
    assert shown.startswith("# @package _global_\n# Translated from ds.json\n")
    assert "#   zero_optimization.round_robin_gradients=true: no counterpart" in shown
    assert yaml.safe_load(shown)["train"]["accumulate"] == 2
    file.write_text(PLAIN)
    assert "not JSON" in run_module("hpctrain.insight.translate", str(file), code=2).stderr


def test_a_file_to_translate_is_a_regular_one_of_at_most_a_mebibyte(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        load(tmp_path / "fifo")
    (tmp_path / "long").write_text(" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="longer than"):
        load(tmp_path / "long")
    (tmp_path / "link").symlink_to("mine")  # the user has named it
    (tmp_path / "mine").write_text("{}")
    assert load(tmp_path / "link") == {}
