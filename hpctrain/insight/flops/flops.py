"""Floating-point operations of a model and its task, counted once without memory or a GPU.

    build() on the meta device ── forward, loss, backward of two samples ── counted per sample

What is counted are matrix products, convolutions and attention, as for the MFU of PaLM (Chowdhery
et al. 2022, appendix B). A multiplication and an addition are two operations. Attention counts as a
whole square, also where it is causal (NVIDIA's Megatron-LM counts one half). Activations that
checkpointing computes twice count once, so the number is the same for every strategy.

How much of what the devices can compute a training so uses is its MFU:

    MFU = FLOPs of the model per sample x samples/s / (devices x peak)

They are counted at the first step, from the shapes of its batch. A run whose batches change their
shapes has no MFU, because its samples differ in their FLOPs.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config import metric_registry as names
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.dry_run import dry_run
from hpctrain.engine.parallel.precision import wide_batch
from hpctrain.engine.parallel.preparing.initial import allocate, skeleton
from hpctrain.engine.parallel.setup import Build
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import SplitTask, Task
from hpctrain.insight.estimates.hardware import peak_of
from hpctrain.insight.flops.identical_blocks import measured_by_block

log = logging.getLogger(__name__)
_ROWS = 2  # a batch norm refuses a single value

COUNTED = "counted without memory; whole square attention"


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of one sample."""

    forward: int  # of the forward pass and the loss
    training: int  # of the forward and the backward pass
    tokens: int  # the tokens of a sample; 0 if the model's input is no integers


def flops_of_training(build: Build, task: Task, batch: Batch) -> Flops | None:
    """Return the operations of a sample of a batch, of which only dtypes and shapes matter.

    `build` is called on the meta device. It is None where the model needs values to be built or
    called.
    """
    model = skeleton(build, 0)
    return None if model is None else count_flops(model, task, meta_batch(batch))


def meta_batch(batch: Batch, rows: int = _ROWS) -> Batch:
    """Return a batch of so many rows without memory; samples are along the first axis."""
    return {
        name: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        for name, tensor in wide_batch(batch).items()
    }


def count_flops(model: nn.Module, task: Task, batch: Batch) -> Flops | None:
    """Return the operations of a sample; None if the model cannot be called without values.

    The model, without wrappers, and the batch are on the meta device. Where the model needs values
    there, fake tensors on the CPU are tried: some libraries know that these have none.
    """
    tokens = tokens_of(task, batch)
    try:
        return _counted(model, task, batch, tokens)
    except Exception as error:  # an operation needs values, which tensors on meta do not have
        log.info("FLOPs cannot be counted on the meta device: %s", _first_line(error))
    try:
        with _without_memory(model), sdpa_kernel(SDPBackend.MATH):
            fakes = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in batch.items()}
            return _counted(model, task, fakes, tokens)
    except Exception as error:
        log.info("FLOPs cannot be counted with fake tensors: %s", _first_line(error))
    return None


def _counted(model: nn.Module, task: Task, batch: Batch, tokens: int) -> Flops:
    from torch.utils.flop_counter import FlopCounterMode

    rows = len(batch["mask"])

    def measure() -> tuple[int, int]:
        with FlopCounterMode(display=False) as forward:
            loss = copy.copy(task)(model, batch)["loss"][0]  # it may keep tensors on a device
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        return forward.get_total_flops(), backward.get_total_flops()

    try:
        with dry_run(model):
            model.train()
            first, second = measured_by_block(model, measure)
    finally:
        model.zero_grad(set_to_none=True)
    return Flops(first // rows, (first + second) // rows, tokens)


@contextmanager
def _without_memory(model: nn.Module) -> Iterator[None]:
    """Within it tensors are fakes on the CPU, also those of the model."""
    before = [
        (tensors, dict(tensors))
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, torch.device("cpu"))
            yield
    finally:
        for tensors, values in before:
            tensors.update(values)  # type: ignore[arg-type]


def tokens_of(task: Task, batch: Batch) -> int:
    """Return the number of tokens of a sample: the integers of the model's first input.

    A task that is not split has no tokens.
    """
    if not isinstance(task, SplitTask):
        return 0
    given: Any = task.inputs(batch)[0]
    return 0 if given.is_floating_point() else int(given[0].numel())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


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
    log.info("FLOPs of a sample: %.4g (%s)", needed.training, COUNTED)
    return needed.training


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tensor.shape[1:] for tensor in batch.values()]
