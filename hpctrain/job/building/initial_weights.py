"""Gives the model of a run the weights of `checkpoint.init_from`, before its first step."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from torch import nn

from hpctrain.checkpoint.manifest import checkpoints
from hpctrain.checkpoint.matching import Match, listed, renames
from hpctrain.checkpoint.starting_point import plain_name, start_from
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.checkpoint.weight_files import WeightFiles, find_weights
from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.distributed import objects
from hpctrain.distributed.long_work import long_work
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.models.quantized import quantize
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.weights_digest import verified
from hpctrain.secrets import referenced

log = logging.getLogger(__name__)


def load_initial(config: Config, run: RunDir, ranks: RankInfo, model: ParallelModel) -> None:
    """Load the weights that the run starts from, unless it has a checkpoint of its own.

    The checkpoints of a run with adapters (LoRA) do not hold them, so they are loaded every time.
    All ranks call this together. Rank 0 reports what matched, in the log and in
    `provenance/weights.json`.
    """
    checkpoint = config.checkpoint
    if checkpoint.init_from is None:
        return
    resumes = _resumes(run, ranks)
    if resumes and not adapted_base(config):
        return
    files = _verified(config, ranks)
    with long_work("loading checkpoint.init_from"):
        stages = model.mesh.pp_group if model.mesh.degrees.pp > 1 else None
        try:
            found = start_from(
                model.module,
                open_weights(files),
                renames(checkpoint.init_rename),
                checkpoint.init_skip,
                stages,
                all_used=not resumes,
            )
        except ConfigError as error:
            raise ConfigError(f"checkpoint.init_from={files.path}: {error}") from error
    if adapted_base(config):
        _refuse_gaps(model.module, {*found.initial, *found.skipped})
        if config.train.lora.quantize:
            quantize(model.module)
    if ranks.is_main:
        _report(config, run, found)


def adapted_base(config: Config) -> str:
    """Return the digest of the weights that the adapters of a run belong to; "" without LoRA."""
    return str(config.checkpoint.init_digest) if config.train.lora.patterns else ""


def _refuse_gaps(module: nn.Module, missing: set[str]) -> None:
    """Raise a ConfigError if a weight is neither loaded nor trained; all ranks call this.

    No checkpoint would hold its value.
    """
    named = module.named_parameters()
    frozen = {plain_name(name) for name, p in named if not p.requires_grad}
    gaps = [name for part in objects.all_gather(sorted(missing & frozen)) for name in part]
    if gaps:
        names = sorted({*gaps})
        raise ConfigError(
            f"train.lora: checkpoint.init_from does not have {listed(names)}, and adapters alone "
            f"do not train them; train.lora.also=[{', '.join(names[:3])}] does"
        )


def _resumes(run: RunDir, ranks: RankInfo) -> bool:
    there = bool(checkpoints(run.checkpoints)) if ranks.is_main else None
    return bool(objects.broadcast(there))


def _verified(config: Config, ranks: RankInfo) -> WeightFiles:
    """Return the files; rank 0 computes their digest, and all ranks raise its error."""
    answer: dict[str, str] = {}
    with long_work("verifying checkpoint.init_from"):
        if ranks.is_main:
            try:
                answer["path"] = str(verified(config.checkpoint, config.output_dir).path)
            except HpctrainError as error:
                answer["error"] = str(error)
    answer = objects.broadcast(answer)
    if "error" in answer:
        raise StorageError(answer["error"])
    return find_weights(Path(answer["path"]))


def _report(config: Config, run: RunDir, found: Match) -> None:
    checkpoint = config.checkpoint
    log.info("the weights of %s: %s", checkpoint.init_from, "; ".join(found.lines()))
    facts = {"path": checkpoint.init_from, "digest": checkpoint.init_digest, **asdict(found)}
    del facts["other_shape"]  # empty, or the run would not have begun
    run.provenance.mkdir(exist_ok=True)
    write_atomically(
        run.provenance / "weights.json", json.dumps(referenced(facts), indent=1) + "\n"
    )
