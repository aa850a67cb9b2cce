"""How much of what the devices can compute the training uses: MFU.

    MFU = FLOPs of the model per sample x samples/s / (devices x peak)      PaLM, appendix B

(Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways".) The FLOPs are counted at
the first step, from the shapes of its batch. A run whose batches change their shapes has no MFU,
because its samples differ in their FLOPs.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config import metric_registry as names
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.dry_run import dry_run
from hpctrain.engine.parallel.preparing.initial import Build
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import Task
from hpctrain.insight.estimates.hardware import peak_of
from hpctrain.insight.flops.flops import flops_of_training

log = logging.getLogger(__name__)


class Utilisation:
    """The MFU of a run.

    `count` returns the operations that the model and its loss need for a sample of a batch, and
    their gradients; None if they cannot be counted. `peak` is
    FLOP/s of all devices together, for the format that computes. `due`: `begin` has to be called
    with the next batch.
    """

    def __init__(self, count: Callable[[Batch], int | None], peak: float) -> None:
        self._count, self._peak = count, peak
        self._work: int | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._told = False
        self.due = True

    def begin(self, batch: Batch) -> None:
        """Count the operations of the samples of the first batch."""
        self.due = False
        self._work, self._shapes = self._count(batch), _shapes(batch)

    def see(self, batch: Batch) -> None:
        """Note the shapes of a batch."""
        if self._work is not None and _shapes(batch) != self._shapes:
            self._work = None
            log.info("no MFU: the samples of different batches have different shapes")

    def metrics(self, samples_per_s: float) -> dict[str, float]:
        """Return the MFU at this speed, where it is known."""
        if self._work is None:
            return {}
        mfu = 100 * self._work * samples_per_s / self._peak
        if mfu > 100:
            if not self._told:
                log.error(
                    "MFU would be %.0f%%, more than the devices can do, so it is not recorded: the "
                    "peak of %.4g TFLOP/s in the figures of the hardware is too low, or the FLOPs "
                    "of the model are counted wrongly",
                    *(mfu, self._peak / 1e12),
                )
            self._told = True
            return {}
        return {names.MFU_PERCENT: mfu}


def build_utilisation(
    build: Build,
    model: ParallelModel,
    task: Task,
    hardware_section: dict[str, Any],
    ranks: RankInfo,
) -> Utilisation | None:
    """Return what measures the MFU; None where the device or the model is unknown.

    `build` makes another such model.
    """
    device, peak = model.precision.device, None
    if ranks.is_main and (device.type == "cuda" or hardware_section):
        asked = hardware_section, model.precision.compute
        peak = peak_of(*asked, *_named(device))
    if peak is None:
        return None
    if not all(parameter.requires_grad for parameter in model.module.parameters()):
        log.info("no MFU: parameters that are not trained need fewer operations than are counted")
        return None
    return Utilisation(partial(_count, build, task), peak * ranks.world_size)


def _named(device: torch.device) -> tuple[str, int | None]:
    """Return the name and the bytes of a GPU; "" and None for a CPU."""
    if device.type != "cuda":
        return "", None
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory


def _count(build: Build, task: Task, batch: Batch) -> int | None:
    """Return the operations of a sample; the random state stays as it is."""
    with dry_run():
        needed = flops_of_training(build, task, batch)
    if needed is None:
        log.info("no MFU: the FLOPs of this model cannot be counted")
        return None
    log.info("FLOPs of a sample: %.4g (%s)", needed.training, needed.convention)
    return needed.training


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tensor.shape[1:] for tensor in batch.values()]
