"""Builds the plain model of a run on one process, with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.matching import renames
from hpctrain.checkpoint.starting_point import start_from
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.checkpoint.weights import load_weights
from hpctrain.config.schema import Config
from hpctrain.errors import StorageError
from hpctrain.job.building.make import make
from hpctrain.models.lora import add_adapters, freeze_base
from hpctrain.models.quantized import quantize
from hpctrain.parallel.preparing.parameter_settings import freeze, settings
from hpctrain.runs.weights_digest import verified


def trained_model(config: Config, checkpoint: Path, *, ema: bool = False) -> nn.Module:
    """Return the model of a run, in training mode, on the CPU.

    A run with adapters (LoRA) has checkpoints of these only; the other weights come from
    `checkpoint.init_from`.

    With `ema` it has the moving average of the parameters (`train.ema`).
    """
    model: nn.Module = make("model", config.model)
    lora = config.train.lora
    if lora.patterns:
        check_base(config, checkpoint)
        add_adapters(model, lora.patterns, lora.rank, lora.alpha, lora.dropout)
        chosen = settings(model, config.optimizer, config.parallel.blocks)
        freeze_base(model, lora.also)
        freeze(model, chosen)
        start = config.checkpoint
        weights = open_weights(verified(config))
        start_from(model, weights, renames(start.init_rename), start.init_skip)
        if lora.quantize:
            quantize(model)
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
