"""Bytes that a forward pass keeps for the backward pass, measured with tensors without memory.

    FakeTensorMode, device cpu ── forward, loss, backward ── sums of live bytes, of two batches

On the meta device attention would make its whole square of scores, which a GPU does not. With fake
tensors on the CPU it takes the flash kernel, which keeps what the one of a GPU keeps. Parameters,
their converted copies and their gradients are left out: `hpctrain.insight.plan.memory` has them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.parallel.preparing.initial import allocate
from hpctrain.engine.parallel.preparing.whole_model import cast_parameters
from hpctrain.engine.parallel.setup import Build
from hpctrain.insight.flops.flops import tokens_of
from hpctrain.insight.flops.identical_blocks import measured_by_block
from hpctrain.insight.plan.inspecting.model_facts import explained

log = logging.getLogger(__name__)
_ROWS = 2  # a batch norm needs two, and transformers looks for documents in a single row
_TOKENS = 4096
_NEED_VALUES = (
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


class MeasuredActivations:
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
        classes: Sequence[str] = (),
    ) -> None:
        self._build, self._task, self._sample, self._classes = build, task, sample, [*classes]
        self._compute, self._tokens = compute, tokens_of(task, sample)
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
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = _without_memory(self._build, fake)
        if cast and self._compute is not None:
            with fake:
                cast_parameters(model, self._compute)
            model.register_forward_pre_hook(partial(_lowered, self._compute), with_kwargs=True)
        if mode != "none":
            blocks = [block for _, block in find_blocks(model, self._classes)]
            checkpoint_activations(blocks, mode)
        model.train()

        def step(rows: int) -> _StepBytes:
            with fake:
                return self._step(model, rows)

        try:
            with explained(self._called, _NEED_VALUES):
                return _per_sample(model, step, self._tokens)
        except _NEED_VALUES as error:
            log.info("activations cannot be measured: %s", error)
            return Activations(0, 0, 0, 0, exact=False)

    def _step(self, model: nn.Module, rows: int) -> _StepBytes:
        sample = self._sample.items()
        batch = {name: torch.empty((rows, *t.shape[1:]), dtype=t.dtype) for name, t in sample}
        return _step_bytes(model, self._task, batch, self._compute)

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


def _per_sample(model: nn.Module, step: Callable[[int], _StepBytes], tokens: int) -> Activations:
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

    saved = measured_by_block(model, measure)[0]
    outside = (losses[2 * rows] - losses[rows]) // rows
    part = max(0, losses[rows] - rows * outside)
    return Activations(saved, max(working), outputs[-1], outside, part, losses[least] // least)


@dataclass(frozen=True)
class _StepBytes:
    """Bytes of a whole batch in one step."""

    saved: int  # by all blocks when the forward pass ends, without the outputs
    outputs: int
    loss: int  # the outputs, and what the loss needs until their gradient is there
    # Beside `saved`, after each operation from then on that returns a new tensor. Gradients of
    # parameters are among them only while they are computed.
    backward: list[int]


def _step_bytes(
    model: nn.Module, task: Any, batch: Batch, compute: torch.dtype | None
) -> _StepBytes:
    """Make a step, in which `compute` is the dtype of autocast, and return its sums."""
    live = _Live([*model.parameters(), *model.buffers()])
    at_outputs: list[int] = []  # their size, and all bytes with them
    ends: list[int] = []  # how many sums there are when the gradient of the outputs is there

    def note(module: nn.Module, args: Any, result: Any) -> None:
        gc.collect()  # selective checkpointing leaves circles of references behind
        found = [t for t in tree_leaves(result) if _is_tensor(t)]
        at_outputs[:] = sum(map(_nbytes, found)), live.now()
        live.sums.clear()
        if found and found[0].requires_grad:
            found[0].register_hook(lambda _: ends.append(len(live.sums)))

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(note).remove)
        for p in model.parameters():
            if p.requires_grad:  # its gradient is left out as soon as it is one
                forget = p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
                stack.callback(forget.remove)
        if gc.isenabled():
            gc.disable()  # so that the same operations see the same tensors
            stack.callback(gc.enable)
        with live, _Kernels():
            with nullcontext() if compute is None else torch.autocast("cpu", dtype=compute):
                loss = task(model, batch)["loss"][0]
            loss.backward()
    outputs, whole = at_outputs
    end, saved = next(iter(ends), 0), whole - outputs
    above = [now - saved for now in live.sums]
    return _StepBytes(saved, outputs, max([outputs, *above[:end]]), above[end:])


class _Kernels(TorchFunctionMode):
    """Attention drops nothing: with dropout a CPU would keep all scores, which a GPU does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            given |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args, given["dropout_p"] = args[:3], 0.0
        return func(*args, **given)


class _Live(TorchDispatchMode):
    """Adds up the bytes of all tensors but `states` that operations return, while they live."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = set(map(_key, states))
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        # As long as a weak reference exists, no other storage gets the same key.
        self._held: list[StorageWeakRef] = []
        self.sums: list[int] = []  # after each operation that returned a new tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all operations only ask for it
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _key(args[0]) in self._states:
            # It is a copy of a parameter in the format of the computation.
            self._states.add(_key(out))
            self._held.append(StorageWeakRef(out.untyped_storage()))
        before = len(self._storages)
        for leaf in filter(_is_tensor, tree_leaves(out)):
            if (key := _key(leaf)) not in self._states and key not in self._storages:
                self._storages[key] = StorageWeakRef(leaf.untyped_storage()), _nbytes(leaf)
        if len(self._storages) > before:
            self.sums.append(self.now())
        return out

    def now(self) -> int:
        """Return the present bytes."""
        for key in [key for key, (held, _) in self._storages.items() if held.expired()]:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, FakeTensor):  # asking it for `device` is an operation, which takes long
        return leaf.fake_device.type == "cpu"
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
