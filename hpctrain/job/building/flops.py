"""Floating-point operations of a model and its task, counted once without memory or a GPU.

    build() on the meta device ── forward, loss, backward of two samples ── counted per sample

What is counted are matrix products, convolutions and attention, as for the MFU of PaLM (Chowdhery
et al. 2022, appendix B). A multiplication and an addition are two operations. Attention counts as a
whole square, also where it is causal (NVIDIA's Megatron-LM counts one half). Activations that
checkpointing computes twice count once, so the number is the same for every strategy, and what
follows from it is MFU and not HFU.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.models.dry_run import dry_run
from hpctrain.models.experts import used_evenly
from hpctrain.parallel.preparing.identical_blocks import measured_by_block
from hpctrain.parallel.preparing.initial import Build, skeleton
from hpctrain.shards.types import Batch
from hpctrain.tasks import SplitTask, Task

log = logging.getLogger(__name__)
_ROWS = 2  # a batch norm refuses a single value

COUNTED = "counted on the meta device; whole square attention"
FORMULA = "6 N + 12 layers x dim x length per token (PaLM), as the model cannot be counted"


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of one sample."""

    forward: int  # of the forward pass and the loss
    training: int  # of the forward and the backward pass
    tokens: int  # the tokens of a sample; 0 if the model's input is no integers
    convention: str = COUNTED  # how they were counted, for a reader


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
        for name, tensor in batch.items()
    }


def count_flops(model: nn.Module, task: Task, batch: Batch) -> Flops | None:
    """Return the operations of a sample; None if the model cannot be called without values.

    The model, without wrappers, and the batch are on the meta device.
    """
    rows, tokens = len(batch["mask"]), tokens_of(task, batch)

    def measure() -> tuple[int, int]:
        with FlopCounterMode(display=False) as forward:
            loss = copy.copy(task)(model, batch)["loss"][0]  # it may keep tensors on a device
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        return forward.get_total_flops(), backward.get_total_flops()

    try:
        with dry_run(model), used_evenly(model):
            model.train()
            first, second = measured_by_block(model, measure)
    except Exception as error:  # an operation needs values, which tensors on meta do not have
        log.info("FLOPs cannot be counted on the meta device: %s", _first_line(error))
        return _by_formula(model, tokens)
    finally:
        model.zero_grad(set_to_none=True)
    return Flops(first // rows, (first + second) // rows, tokens)


def tokens_of(task: Task, batch: Batch) -> int:
    """Return the number of tokens of a sample: the integers of the model's first input.

    A task that is not split has no tokens.
    """
    if not isinstance(task, SplitTask):
        return 0
    given: Any = task.inputs(batch)[0]
    return 0 if given.is_floating_point() else int(given[0].numel())


def _by_formula(model: nn.Module, tokens: int) -> Flops | None:
    """Return the operations that a model itself states by its method `flops_per_token`."""
    method = getattr(model, "flops_per_token", None)
    if method is None or not tokens:
        return None
    total = int(method(tokens)) * tokens
    return Flops(total // 3, total, tokens, FORMULA)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
