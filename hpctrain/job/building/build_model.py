"""Builds the task and the model of a config: on the ranks, or trained and on one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.matching import renames
from hpctrain.checkpoint.starting_point import load_weights, start_from
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.config.schema import Config
from hpctrain.errors import StorageError
from hpctrain.job.building.instantiate import instantiate
from hpctrain.models.lora import add_adapters, freeze_base
from hpctrain.models.quantized import quantize
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.parameter_settings import freeze, settings
from hpctrain.parallel.recipe import parallelize
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.runs.weights_digest import verified
from hpctrain.tasks import Task, bind


def build_task(config: Config) -> Task:
    """Return the task for whole sequences."""
    return bind(instantiate("task", config.task), config.data.path)


def build_model(
    config: Config, mesh: Mesh, precision: Precision, task: Task, *, divided_loss: bool = True
) -> ParallelModel:
    """Return a new model on its ranks, as the task calls it; all ranks call this together.

    With `divided_loss`, tensor parallel may leave the logits divided.
    """
    return parallelize(
        partial(instantiate, "model", config.model),
        config,
        mesh,
        precision,
        loss_parallel=divided_loss and getattr(task, "loss_parallel", False),
        arguments=getattr(task, "arguments", ()),
    )


def trained_model(config: Config, checkpoint: Path, *, ema: bool = False) -> nn.Module:
    """Return the model of a run, in training mode, on the CPU.

    A run with adapters (LoRA) has checkpoints of these only; the other weights come from
    `checkpoint.init_from`. With `ema` it has the moving average of the parameters (`train.ema`).
    """
    model: nn.Module = instantiate("model", config.model)
    lora = config.train.lora
    if lora.patterns:
        check_base(config, checkpoint)
        add_adapters(model, lora.patterns, lora.rank, lora.alpha, lora.dropout)
        chosen = settings(model, config.optimizer, config.parallel.blocks)
        freeze_base(model, lora.also)
        freeze(model, chosen)
        load_base(config, model)
    load_weights(model, checkpoint, ema=ema, trained_only=bool(lora.patterns))
    return model


def check_base(config: Config, checkpoint: Path) -> None:
    """Check that the adapters belong to the weights of the config; others are a StorageError."""
    base = Manifest.read(checkpoint).base
    if base != config.checkpoint.init_digest:
        raise StorageError(
            f"{checkpoint} has adapters of other weights ({base or 'none'}) than those of "
            f"checkpoint.init_digest={config.checkpoint.init_digest}"
        )


def load_base(config: Config, module: nn.Module, stages: dist.ProcessGroup | None = None) -> None:
    """Load the weights that adapters belong to; with a pipeline all its stages call this."""
    start = config.checkpoint
    weights = open_weights(verified(config.checkpoint, config.output_dir))
    start_from(module, weights, renames(start.init_rename), start.init_skip, stages)
    if config.train.lora.quantize:
        quantize(module)
