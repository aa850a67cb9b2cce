"""Bytes that a forward pass keeps for the backward pass, measured with tensors without memory.

    FakeTensorMode, device cpu ── forward, loss, backward ── sums of live bytes, of two batches

On the meta device attention would make its whole square of scores, which a GPU does not. With fake
tensors on the CPU it takes the flash kernel, which keeps what the one of a GPU keeps. Parameters,
their converted copies and their gradients are left out: `hpctrain.plan.memory` has them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map

from hpctrain.config.schema import TrainConfig
from hpctrain.job.building.flops import tokens_of
from hpctrain.models.experts import used_evenly
from hpctrain.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.identical_blocks import measured_by_block
from hpctrain.parallel.preparing.initial import Build, allocate
from hpctrain.parallel.preparing.whole_model import cast_parameters
from hpctrain.plan.inspecting.live_bytes import StepBytes, step_bytes
from hpctrain.plan.inspecting.model_facts import explained
from hpctrain.shards.types import Batch

log = logging.getLogger(__name__)
_ROWS = 2  # a batch norm needs two, and transformers looks for documents in a single row
_TOKENS = 4096
# A model that needs values is called with some, if its steps have no more operations than these.
_MOST_FLOPS = 10**12
NEED_VALUES = (
    *(DataDependentOutputException, DynamicOutputShapeException, NotImplementedError),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)


@dataclass(frozen=True)
class Activations:
    """Bytes for each sample of a micro-batch."""

    saved: int  # by all blocks when the forward pass ends
    working: int  # of the backward pass of one block, beside `saved`
    outputs: int
    outside: int  # the outputs and the loss
    # Some losses compute a part of the positions at a time: these bytes of a micro-batch, whatever
    # its samples; and what a sample needs where all positions of a micro-batch are one part.
    of_part: int = 0
    alone: int = 0
    exact: bool = True  # measured; otherwise they are 0 and unknown

    def of_loss(self, samples: float) -> int:
        """Return the bytes of the outputs and the loss of so many samples."""
        return int(min(self.alone * samples, self.of_part + self.outside * samples))


class Measured:
    """The activations for each mode of checkpointing, measured when they are first needed.

    `compute` is the dtype of autocast. FSDP2 converts the parameters and the inputs of the model
    instead, so that norms and the residual stream have this dtype too (`cast`). `classes` are those
    of `parallel.blocks`.
    """

    def __init__(
        self,
        build: Build,
        task: Any,
        sample: Batch,
        compute: torch.dtype | None,
        train: TrainConfig,
        classes: Sequence[str] = (),
    ) -> None:
        self._build, self._task, self._sample, self._classes = build, task, sample, [*classes]
        self._compute, self._train, self._tokens = compute, train, tokens_of(task, sample)
        self._found: dict[tuple[str, bool], Activations] = {}

    def __getitem__(self, mode: str) -> Activations:
        """Return those of parameters that autocast converts."""
        return self.of(mode, cast=False)

    def of(self, mode: str, *, cast: bool) -> Activations:
        """Return those of a mode; a ConfigError if the sample does not fit, or it needs blocks."""
        key = mode, cast and self._compute is not None
        if key not in self._found:
            self._found[key] = self._measure(*key)
        return self._found[key]

    def _measure(self, mode: str, cast: bool) -> Activations:
        fake, train = FakeTensorMode(allow_non_fake_inputs=True), self._train
        train = replace(train, activation_checkpointing=mode)
        model = _without_memory(self._build, fake)
        if cast and self._compute is not None:
            with fake:
                cast_parameters(model, self._compute)
            model.register_forward_pre_hook(partial(_lowered, self._compute), with_kwargs=True)
        self._prepare(model, train)

        def step(rows: int) -> StepBytes:
            with fake:
                return self._step(model, rows)

        try:
            with used_evenly(model):
                return _per_sample(model, step, self._tokens)
        except Exception as error:  # an operation needs values, or the sample does not fit
            del model
            return self._with_values(error, train)

    def _with_values(self, error: Exception, train: TrainConfig) -> Activations:
        """Return those of a small model whose tensors have values; `error` fails without."""
        with torch.device("meta"):
            size = sum(p.numel() for p in self._build().parameters())
        rows = 1 if self._tokens else _ROWS
        if 36 * size * max(1, self._tokens) * rows > _MOST_FLOPS:
            if isinstance(error, NEED_VALUES):
                log.info("activations cannot be measured: %s", error)
                return Activations(0, 0, 0, 0, exact=False)
            with explained(self._called):
                raise error
        model = self._build()
        self._prepare(model, train)
        with explained(self._called):
            step = partial(self._step, model, values=_values)
            return _per_sample(model, step, self._tokens, by_block=False)

    def _prepare(self, model: nn.Module, train: TrainConfig) -> None:
        mode, every = train.activation_checkpointing, train.activation_checkpointing_every
        if mode != "none":
            blocks = [block for _, block in find_blocks(model, self._classes)]
            checkpoint_activations(blocks, mode, every)
        model.train()

    def _step(
        self, model: nn.Module, rows: int, values: Callable[..., Any] = torch.empty
    ) -> StepBytes:
        sample = self._sample.items()
        batch = {name: values((rows, *t.shape[1:]), dtype=t.dtype) for name, t in sample}
        return step_bytes(model, self._task, batch, self._compute)

    @property
    def _called(self) -> str:
        """Which call an error is about."""
        fields = ", ".join(
            f"{name} {'x'.join(map(str, tensor.shape[1:])) or 'one number'}"
            for name, tensor in self._sample.items()
            if name != "mask"
        )
        return f"plan: the call of the task and the model with a sample of {fields}"


def _without_memory(build: Build, fake: FakeTensorMode) -> nn.Module:
    """Return a new model whose parameters and buffers are fake tensors on the CPU."""
    try:
        with fake:
            return build()
    except Exception:  # as those of timm, it computes with values of the CPU while it is built
        with torch.device("meta"):
            model = build()
        with fake:
            allocate(model, torch.device("cpu"))
        return model


def _lowered(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a call with floats of a dtype."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(one, args), tree_map(one, kwargs)


def _per_sample(
    model: nn.Module, step: Callable[[int], StepBytes], tokens: int, *, by_block: bool = True
) -> Activations:
    """Return the bytes of a sample, from steps of some samples and of twice as many.

    Sums after the same operation are compared: what does not grow with the batch are gradients on
    their way. What blocks keep adds up over the blocks; the largest sums beside it do not.
    """
    rows = max(_ROWS, _TOKENS // tokens) if tokens else _ROWS
    least = 1 if tokens else rows
    losses, outputs, working = dict[int, int](), [0], [0]

    def measure() -> tuple[int]:
        few, more = step(rows), step(2 * rows)
        losses.update({rows: few.loss, 2 * rows: more.loss})
        outputs.append((more.outputs - few.outputs) // rows)
        if least not in losses:
            losses[least] = step(least).loss
        sums = few.backward, more.backward
        if len(sums[0]) != len(sums[1]):  # a model that computes in parts
            sums = [max(sums[0])], [max(sums[1])]
        working.append(max((b - a for a, b in zip(*sums, strict=True)), default=0) // rows)
        return ((more.saved - few.saved) // rows,)

    saved = measured_by_block(model, measure)[0] if by_block else measure()[0]
    outside = (losses[2 * rows] - losses[rows]) // rows
    part = max(0, losses[rows] - rows * outside)
    return Activations(saved, max(working), outputs[-1], outside, part, losses[least] // least)


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return torch.full(shape, int(dtype == torch.bool), dtype=dtype)
