"""Builds the model of a run on the ranks that were started, with the weights of a checkpoint.

config of the run ── other ranks, other data ── parallelize ── weights of the checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.starting_point import restore, restore_average
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.checkpoint.weight_files import WeightFiles
from hpctrain.config.evaluation_job import fit_batch
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.distributed.group import group_of_config
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError
from hpctrain.job.building.build_data import DataBuilder
from hpctrain.job.building.build_model import build_model, build_task, check_base, load_base
from hpctrain.job.building.instantiate import instantiate
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.progress_bar import Progress
from hpctrain.tasks import Task, on_part

_FIRST_S = 2.0  # until the line that estimates the time


@dataclass(frozen=True)
class Restored:
    """A trained model on its ranks, in eval mode, and what it is used with; `data` builds feeds."""

    model: ParallelModel
    task: Task
    data: DataBuilder
    config: Config
    ranks: RankInfo
    device: torch.device

    def progress(self, samples: int, label: str) -> Progress:
        """Return the progress over so many samples of all ranks, which rank 0 shows on stderr."""
        return Progress(samples, 0, label=label, quiet=not self.ranks.is_main, first_s=_FIRST_S)


@contextmanager
def restored(
    config: Config, checkpoint: Path, folder: Path, *, divided_loss: bool = True
) -> Iterator[Restored]:
    """Yield the model of a run on the ranks that were started; all ranks call this together.

    Its parameters are those with which the training evaluates: their average, where it does so.
    Batch sizes are fitted to the ranks. `folder` keeps the secret by which the ranks know each
    other. With `divided_loss`, tensor parallel may leave the logits divided.
    """
    ranks = RankInfo.from_env()
    try:
        degrees = Degrees.of(config.parallel, ranks.world_size)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThe run was trained in another layout; a checkpoint fits any: give one for "
            "these ranks, such as parallel.tp=1 parallel.pp=1"
        ) from error
    fit_batch(config, degrees)
    with group_of_config(config, ranks, folder) as device:
        mesh = Mesh(degrees, ranks.rank, device)
        task = on_part(build_task(config), mesh.sequence_part)
        precision = Precision(config.precision, device)
        model = build_model(config, mesh, precision, task, divided_loss=divided_loss)
        _load(config, checkpoint, model)
        model.module.eval()
        data = DataBuilder(config, ranks, mesh, device, instantiate)
        yield Restored(model, task, data, config, ranks, device)
        del model


def _load(config: Config, checkpoint: Path, model: ParallelModel) -> None:
    stages = model.mesh.pp_group if model.mesh.degrees.pp > 1 else None
    adapters = bool(config.train.lora.patterns)
    if adapters:
        check_base(config, checkpoint)
        load_base(config, model.module, stages)
    restore(model.module, open_weights(WeightFiles(checkpoint, None)), trained_only=adapters)
    if config.train.ema is not None and config.train.ema_evaluation:
        restore_average(model.module, open_weights(WeightFiles(checkpoint, None), "ema"))
