"""Build what measures MFU: the peak of the devices, and how the FLOPs of a sample are counted."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import torch

from hpctrain import hardware
from hpctrain.config.schema import TrainConfig
from hpctrain.distributed.ranks import RankInfo
from hpctrain.hardware import Hardware
from hpctrain.job.building.flops import Flops, count_flops, meta_batch
from hpctrain.models.dry_run import dry_run
from hpctrain.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.initial import Build, skeleton
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.shards.types import Batch
from hpctrain.tasks import Task
from hpctrain.training.measuring.utilisation import Utilisation, Work

log = logging.getLogger(__name__)


def build_utilisation(
    build: Build,
    model: ParallelModel,
    task: Task,
    train: TrainConfig,
    blocks: list[str],
    section: dict[str, Any],
    ranks: RankInfo,
) -> Utilisation | None:
    """Return what measures MFU and HFU; None where the device or the model is unknown.

    `build` makes another such model, whose `blocks` have names of classes; the section is that of
    the hardware.
    """
    figures = _figures(section, model.precision.device)
    peak = None if figures is None else figures.peak(model.precision.compute)
    if not ranks.is_main or peak is None:
        return None
    if not all(parameter.requires_grad for parameter in model.module.parameters()):
        log.info("no MFU: parameters that are not trained need fewer operations than are counted")
        return None
    return Utilisation(partial(_count, build, task, train, blocks), peak * ranks.world_size)


def _figures(section: dict[str, Any], device: torch.device) -> Hardware | None:
    """Return the figures of this device, by its exact name; those of a CPU if the user gave them.

    The section `hardware` may also be of a machine that is only planned with.
    """
    given = hardware.of_section(section) if section else None
    if device.type != "cuda":
        return given if given is not None and given.name.startswith("cpu") else None
    name = torch.cuda.get_device_name(device)
    if given is not None and name in given.devices:
        return given
    return hardware.of_device(name, torch.cuda.get_device_properties(device).total_memory)


def _count(
    build: Build, task: Task, train: TrainConfig, blocks: list[str], batch: Batch
) -> Work | None:
    """Return the operations of a sample; the random state stays as it is."""
    mode, on_meta = train.activation_checkpointing, meta_batch(batch)

    def counted(mode: str) -> Flops | None:
        model = skeleton(build, 0)
        if model is not None and mode != "none":
            checkpoint_activations([block for _, block in find_blocks(model, blocks)], mode, 1)
        return None if model is None else count_flops(model, task, on_meta)

    with dry_run():
        needed = counted("none")
        if needed is None:
            log.info("no MFU: the FLOPs of this model cannot be counted")
            return None
        again = 0.0
        if mode != "none" and (with_all := counted(mode)) is not None:
            # Of the blocks, each of which is counted, only the first of `every` computes again.
            every = train.activation_checkpointing_every
            again = max(0, with_all.training - needed.training) / every
    log.info("FLOPs of a sample: %.4g (%s)", needed.training, needed.convention)
    return Work(needed.training, needed.training + math.ceil(again))
