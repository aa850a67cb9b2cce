"""The model of a run with the weights that it has trained.

a checkpoint ┬─ load_trained ── a model on its ranks
             └─ trained_model ─ a new one in this process alone
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.addons.quantized import quantize, release
from hpctrain.config.schema import CheckpointConfig, LoRAConfig, TrainConfig
from hpctrain.config.sections import ModelSections
from hpctrain.data.generators import seeded_generators
from hpctrain.engine.building.build_model import stages_of, start_weights
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.starting_point import first_names, names_of_base, weights_of
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parallel.preparing.whole_model import cast_parameters, freeze, with_adapters
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import StorageError
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.checkpoints.matching import misshapen
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.chosen_checkpoint import verified


def load_trained(
    start: CheckpointConfig,
    train: TrainConfig,
    output_dir: str,
    checkpoint: Path,
    model: ParallelModel,
) -> None:
    """Give a model the parameters with which the training evaluates, on all its ranks together."""
    adapters = bool(train.lora.patterns)
    if adapters:
        check_base(start, checkpoint)
        _load_base(start, train.lora, output_dir, model.module, stages_of(model))
    ema = train.ema is not None
    load_weights(model.module, checkpoint, ema=ema, trained_only=adapters)


def trained_model(sections: ModelSections, checkpoint: Path, *, ema: bool = False) -> nn.Module:
    """Return the model of a run, in training mode, on the CPU.

    With `ema` it has the moving average of the parameters (`train.ema`).
    """
    lora, start = sections.lora, sections.start
    # What the constructor draws and no checkpoint has is that of the training.
    with default_dtype(sections.precision), seeded_generators(sections.seed):
        model = with_adapters(instantiate("model", sections.model), lora)
    if sections.precision.params == "fp64":
        cast_parameters(model, torch.float64)
    if lora.patterns:
        check_base(start, checkpoint)
        freeze(model, sections.optimizer, sections.blocks, lora)
        if lora.quantize:
            release(model, torch.device("cpu"))
        _load_base(start, lora, sections.output_dir, model)
    load_weights(model, checkpoint, ema=ema, trained_only=bool(lora.patterns))
    return model


def check_base(start: CheckpointConfig, checkpoint: Path) -> None:
    """Check that the adapters belong to the weights of `start`; others are a StorageError."""
    base = Manifest.read(checkpoint).base
    if base != start.init_digest:
        raise StorageError(
            f"{checkpoint} has adapters of other weights ({base or 'none'}) than those of "
            f"checkpoint.init_digest={start.init_digest}"
        )


def _load_base(
    start: CheckpointConfig,
    lora: LoRAConfig,
    output_dir: str,
    module: nn.Module,
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Load the weights that adapters belong to; with a pipeline all its stages call this."""
    start_weights(start, module, verified(start, output_dir), stages)
    if lora.quantize:
        quantize(module)


def load_weights(
    model: nn.Module, checkpoint: Path, *, ema: bool = False, trained_only: bool = False
) -> None:
    """Load the weights of a checkpoint of the same model, in place; each rank does it alone.

    `ema` takes the moving average of the parameters (`train.ema`); those that were frozen, and
    buffers, are the model's. Where the ranks had models that differ (local SGD), rank 0's is taken.
    With `trained_only` the checkpoint lacks the weights of the base (LoRA), which are left as they
    are.
    """
    weights, own = open_weights(WeightFiles(checkpoint, None)), weights_of(model)
    if trained_only:
        left_out = names_of_base(model)
        own = {name: value for name, value in own.items() if name not in left_out}
    firsts = first_names(model)
    found = {name: value for name, value in own.items() if name in weights.shapes}
    # A parameter with two names, as in tied embeddings, may be saved under one of them.
    loaded = {firsts.get(name, name) for name in found}
    for name in own:
        if firsts.get(name, name) not in loaded:
            raise StorageError(f"{checkpoint} has no {name}: it is the checkpoint of another model")
    for name, value in found.items():
        there, here = weights.shapes[name], tuple(value.shape)
        if there != here:
            raise StorageError(
                f"{checkpoint} is the checkpoint of another model: {misshapen(name, there, here)}"
            )
    weights.load(found)
    if ema:
        average = open_weights(WeightFiles(checkpoint, None), "ema")
        if not average.shapes:
            raise StorageError(
                f"{checkpoint} has no average of the parameters: only runs with train.ema keep one"
            )
        average.load({name: value for name, value in own.items() if name in average.shapes})
