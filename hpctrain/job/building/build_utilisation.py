"""Build what measures MFU: the peak of the devices, and how the FLOPs of a sample are counted."""

from __future__ import annotations

import logging
import math
from functools import partial

import torch

from hpctrain import hardware
from hpctrain.config.schema import Config
from hpctrain.hardware import Hardware
from hpctrain.job.building.flops import Flops, count_flops, meta_batch
from hpctrain.job.building.instantiate import instantiate
from hpctrain.models.dry_run import dry_run
from hpctrain.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.initial import skeleton
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.shards.types import Batch
from hpctrain.tasks import Task
from hpctrain.training.measuring.utilisation import Utilisation, Work

log = logging.getLogger(__name__)


def build_utilisation(
    config: Config, model: ParallelModel, task: Task, devices: int, is_main: bool
) -> Utilisation | None:
    """Return what measures MFU and HFU; None where the device or the model is unknown."""
    device = model.precision.device
    figures = _figures(config, device)
    peak = None if figures is None else figures.peak(config.precision.compute)
    if not is_main or peak is None:
        return None
    if not all(parameter.requires_grad for parameter in model.module.parameters()):
        log.info("no MFU: parameters that are not trained need fewer operations than are counted")
        return None
    return Utilisation(partial(_count, config, task), peak * devices)


def _figures(config: Config, device: torch.device) -> Hardware | None:
    """Return the figures of this device, by its exact name; those of a CPU if the user gave them.

    The section `hardware` may also be of a machine that is only planned with.
    """
    given = hardware.of_section(config.hardware) if config.hardware else None
    if device.type != "cuda":
        return given if given is not None and given.name.startswith("cpu") else None
    name = torch.cuda.get_device_name(device)
    if given is not None and name in given.devices:
        return given
    return hardware.of_device(name, torch.cuda.get_device_properties(device).total_memory)


def _count(config: Config, task: Task, batch: Batch) -> Work | None:
    """Return the operations of a sample; the random state stays as it is."""
    mode, every = config.train.activation_checkpointing, config.train.activation_checkpointing_every
    on_meta = meta_batch(batch)
    with dry_run():
        needed = _flops(config, task, on_meta, "none")
        if needed is None:
            log.info("no MFU: the FLOPs of this model cannot be counted")
            return None
        again = 0.0
        if mode != "none" and (with_all := _flops(config, task, on_meta, mode)) is not None:
            # Of the blocks, each of which is counted, only the first of `every` computes again.
            again = max(0, with_all.training - needed.training) / every
    log.info("FLOPs of a sample: %.4g (%s)", needed.training, needed.convention)
    return Work(needed.training, needed.training + math.ceil(again))


def _flops(config: Config, task: Task, batch: Batch, mode: str) -> Flops | None:
    model = skeleton(partial(instantiate, "model", config.model), config.seed)
    if model is None:
        return None
    if mode != "none":
        blocks = [block for _, block in find_blocks(model, config.parallel.blocks)]
        checkpoint_activations(blocks, mode, 1)
    return count_flops(model, task, batch)
