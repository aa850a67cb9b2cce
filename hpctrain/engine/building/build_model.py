"""Gives a model its weights: those that a run starts from, or those that it has trained.

checkpoint.init_from ── load_initial ── the model of a training, before its first step
a checkpoint ┬───────── load_trained ── a model on its ranks
             └───────── trained_model ─ a new one in this process alone

The checkpoints of a run with adapters (LoRA) hold these only; the other weights always come from
`checkpoint.init_from`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import CheckpointConfig, LoRAConfig, TrainConfig
from hpctrain.data.generators import seeded_generators
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.saved_state import plain_name
from hpctrain.engine.checkpoint.starting_point import load_weights, start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.layers.quantized import quantize, release
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parallel.preparing.whole_model import cast_parameters, freeze, with_adapters
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.runs.checkpoints.manifest import Manifest, checkpoints
from hpctrain.runs.checkpoints.matching import Match, listed, renames
from hpctrain.runs.checkpoints.weight_files import WeightFiles, find_weights
from hpctrain.runs.chosen_checkpoint import verified
from hpctrain.runs.run_dir import RunDir

if TYPE_CHECKING:  # the model of a training does not need it
    from hpctrain.config.model_sections import ModelSections

log = logging.getLogger(__name__)


def load_initial(
    start: CheckpointConfig,
    lora: LoRAConfig,
    output_dir: str,
    run: RunDir,
    ranks: RankInfo,
    model: ParallelModel,
) -> None:
    """Load the weights of `checkpoint.init_from`, unless the run's own checkpoint has them all.

    All ranks call this together. Rank 0 says in the log what keeps its initial values.
    """
    resumes = objects.broadcast(bool(checkpoints(run.checkpoints)) if ranks.is_main else None)
    adapted = adapted_base(start, lora)
    if resumes and not adapted:
        return
    files = _verified(start, output_dir, ranks)
    with long_work("loading checkpoint.init_from"):
        try:
            found = _start(start, model.module, files, _stages(model), all_used=not resumes)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.init_from={files.path}: {error}") from error
    if adapted:
        _refuse_gaps(model.module, {*found.initial})
        if lora.quantize:
            quantize(model.module)
    if ranks.is_main:
        log.info("the weights of %s: %s", start.init_from, found)


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
        _load_base(start, train.lora, output_dir, model.module, _stages(model))
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


def adapted_base(start: CheckpointConfig, lora: LoRAConfig) -> str:
    """Return the digest of the weights that the adapters of a run belong to; "" without LoRA."""
    return str(start.init_digest) if lora.patterns else ""


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
    _start(start, module, verified(start, output_dir), stages)
    if lora.quantize:
        quantize(module)


def _start(
    start: CheckpointConfig,
    module: nn.Module,
    files: WeightFiles,
    stages: dist.ProcessGroup | None,
    **options: Any,
) -> Match:
    weights, rename = open_weights(files), renames(start.init_rename)
    return start_from(module, weights, rename, start.init_skip, stages, **options)


def _stages(model: ParallelModel) -> dist.ProcessGroup | None:
    return model.mesh.pp_group if model.mesh.degrees.pp > 1 else None


def _refuse_gaps(module: nn.Module, missing: set[str]) -> None:
    """Raise a ConfigError if a weight is neither loaded nor trained: no checkpoint holds it."""
    named = module.named_parameters()
    frozen = {plain_name(name) for name, p in named if not p.requires_grad}
    gaps = [name for part in objects.all_gather(sorted(missing & frozen)) for name in part]
    if gaps:
        names = sorted({*gaps})
        raise ConfigError(
            f"train.lora: checkpoint.init_from does not have {listed(names)}, and adapters alone "
            f"do not train them; train.lora.also=[{', '.join(names[:3])}] does"
        )


def _verified(start: CheckpointConfig, output_dir: str, ranks: RankInfo) -> WeightFiles:
    """Return the files; rank 0 computes their digest, and all ranks raise its error."""
    answer: dict[str, str] = {}
    with long_work("verifying checkpoint.init_from"):
        if ranks.is_main:
            try:
                answer["path"] = str(verified(start, output_dir).path)
            except HpctrainError as error:
                answer["error"] = str(error)
    answer = objects.broadcast(answer)
    if "error" in answer:
        raise StorageError(answer["error"])
    return find_weights(Path(answer["path"]))
