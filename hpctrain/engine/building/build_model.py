"""Gives a model the weights of `checkpoint.init_from` before its first step.

The checkpoints of a run with adapters (LoRA) hold these only; the other weights always come from
`checkpoint.init_from`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, HpctrainError, StorageError
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import CheckpointConfig, LoRAConfig
from hpctrain.engine.checkpoint.saved_state import plain_name
from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.steps.place import Place
from hpctrain.runs.checkpoints.manifest import checkpoints
from hpctrain.runs.checkpoints.matching import Match, listed, renames
from hpctrain.runs.checkpoints.weight_files import WeightFiles, find_weights
from hpctrain.runs.chosen_checkpoint import verified

log = logging.getLogger(__name__)


def load_initial(place: Place, model: ParallelModel) -> None:
    """Load the weights of `checkpoint.init_from`, unless the run's own checkpoint has them all.

    All ranks call this together. Rank 0 says in the log what keeps its initial values.
    """
    start, lora = place.config.checkpoint, place.config.train.lora
    is_main, own = place.ranks.is_main, place.run.checkpoints
    resumes = objects.broadcast(bool(checkpoints(own)) if is_main else None)
    adapted = adapted_base(start, lora)
    if resumes and not adapted:
        return
    files = _verified(start, place.config.output_dir, place.ranks)
    with long_work("loading checkpoint.init_from"):
        try:
            stages = stages_of(model)
            found = start_weights(start, model.module, files, stages, all_used=not resumes)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.init_from={files.path}: {error}") from error
    if adapted:
        _refuse_gaps(model.module, {*found.initial})
        if lora.quantize:
            offered.quantized.quantize(model.module)
    if is_main:
        log.info("the weights of %s: %s", start.init_from, found)


def adapted_base(start: CheckpointConfig, lora: LoRAConfig) -> str:
    """Return the digest of the weights that the adapters of a run belong to; "" without LoRA."""
    return str(start.init_digest) if lora.patterns else ""


def start_weights(
    start: CheckpointConfig,
    module: nn.Module,
    files: WeightFiles,
    stages: dist.ProcessGroup | None,
    **options: Any,
) -> Match:
    """Load the weights of `checkpoint.init_from` into a module; see `start_from`."""
    weights, rename = open_weights(files), renames(start.init_rename)
    return start_from(module, weights, rename, start.init_skip, stages, **options)


def stages_of(model: ParallelModel) -> dist.ProcessGroup | None:
    """Return the ranks that have the stages of a model; None without a pipeline."""
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
