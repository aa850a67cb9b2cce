"""Bytes that a forward pass keeps for the backward pass, measured with tensors without memory.

    FakeTensorMode, device cpu ── forward, loss, backward ── largest sum of live bytes

On the meta device attention would make its whole square of scores, which a GPU does not. With fake
tensors on the CPU it takes the flash kernel, which keeps what the one of a GPU keeps. Parameters,
their converted copies and their gradients are left out: `hpctrain.plan.memory` has them.
"""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.config.schema import TrainConfig
from hpctrain.job.building.flops import tokens_of
from hpctrain.models.experts import used_evenly
from hpctrain.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.identical_blocks import measured_by_block
from hpctrain.parallel.preparing.initial import Build
from hpctrain.plan.inspecting.model_facts import explained
from hpctrain.shards.types import Batch

log = logging.getLogger(__name__)
# So large that what the samples keep is more than a gradient on its way.
_ROWS = 256
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

    kept: int  # the largest sum: what blocks keep, and what one needs to compute
    outside: int  # the part of it of the logits and the loss
    saved: int  # by all blocks when the forward pass ends
    working: int  # of the backward pass of one block, beside `saved`
    exact: bool = True  # measured; otherwise they are 0 and unknown


def activations_of(
    build: Build, task: Any, sample: Batch, compute: torch.dtype | None, train: TrainConfig
) -> Activations:
    """Return the activations of a sample, by `build`, which returns a new model.

    `compute` is the dtype of autocast. It raises a ConfigError if the sample does not fit, or
    blocks are to be computed again and there are none.
    """
    tokens = tokens_of(task, sample)
    # Losses compute many positions in parts, so the batch is not larger than that of the run.
    few_rows = min(_TOKENS // tokens if tokens else _ROWS, train.global_batch_size // 2)
    few_rows = max(1 if tokens else 2, few_rows)  # a batch norm needs two
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = _without_memory(build, fake).train()
    with fake:
        batches = [
            {name: torch.empty((rows, *t.shape[1:]), dtype=t.dtype) for name, t in sample.items()}
            for rows in (few_rows, 2 * few_rows)
        ]
    _checkpoint(model, train)

    def measure(batch: Batch) -> tuple[int, ...]:
        live = _Live([*model.parameters(), *model.buffers()])
        with fake, live:
            return live.step(model, task, batch, compute)

    try:
        with used_evenly(model):
            few, more = (measured_by_block(model, partial(measure, batch)) for batch in batches)
    except Exception as error:  # an operation needs values, or the sample does not fit
        del model, batches
        return _with_values(error, build, task, sample, compute, train)
    return _for_each(few, more, few_rows)


def _without_memory(build: Build, fake: FakeTensorMode) -> nn.Module:
    """Return a new model whose parameters and buffers are fake tensors on the CPU.

    Some models compute with values of the CPU while they are built, as those of timm do. They are
    built on the meta device, where that works, and get fake tensors afterwards.
    """
    try:
        with fake:
            return build()
    except Exception:
        with torch.device("meta"):
            model = build()
    made: dict[int, torch.Tensor] = {}  # a parameter that modules share stays one
    with fake:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                        if isinstance(tensor, nn.Parameter):
                            empty = nn.Parameter(empty, tensor.requires_grad)
                        made[id(tensor)] = empty
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _with_values(
    error: Exception,
    build: Build,
    task: Any,
    sample: Batch,
    compute: torch.dtype | None,
    train: TrainConfig,
) -> Activations:
    """Return the activations of a small model whose tensors have values; `error` fails without."""
    with torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    rows = 1 if tokens_of(task, sample) else 2  # a batch norm needs two
    if 36 * size * max(1, tokens_of(task, sample)) * rows > _MOST_FLOPS:
        if isinstance(error, NEED_VALUES):
            log.info("activations cannot be measured: %s", error)
            return Activations(0, 0, 0, 0, exact=False)
        explained(partial(_raise, error), _called(sample))
    model = build().train()
    _checkpoint(model, train)

    def measure(rows: int) -> tuple[int, ...]:
        batch = {name: _values((rows, *t.shape[1:]), t.dtype) for name, t in sample.items()}
        live = _Live([*model.parameters(), *model.buffers()])
        with live:
            return live.step(model, task, batch, compute)

    def both() -> Activations:
        return _for_each(measure(rows), measure(2 * rows), rows)

    found: Activations = explained(both, _called(sample))
    return found


def _for_each(few: tuple[int, ...], more: tuple[int, ...], rows: int) -> Activations:
    """Return the bytes of a sample, from those of `rows` samples and of twice as many.

    What does not grow with the batch are gradients on their way.
    """
    kept, outside, saved, working = (max(0, b - a) // rows for a, b in zip(few, more, strict=True))
    return Activations(kept, outside, saved, working)


def _checkpoint(model: nn.Module, train: TrainConfig) -> None:
    if train.activation_checkpointing != "none":
        checkpoint_activations(
            [block for _, block in find_blocks(model, [])],
            train.activation_checkpointing,
            train.activation_checkpointing_every,
        )


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return (
        torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.zeros(shape, dtype=dtype)
    )


def _called(sample: Batch) -> str:
    """Return which call an error is about."""
    fields = ", ".join(
        f"{name} {'x'.join(map(str, tensor.shape[1:])) or 'one number'}"
        for name, tensor in sample.items()
        if name != "mask"
    )
    return f"plan: the call of the task and the model with a sample of {fields}"


def _raise(error: Exception) -> None:
    raise error


class _Live(TorchDispatchMode):
    """Adds up the bytes of all tensors but `states` that operations return, while they live."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = {tensor.untyped_storage()._cdata for tensor in states}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        # As long as a weak reference exists, no other storage gets the same key.
        self._held: list[StorageWeakRef] = []
        self.peak = self._of_loss = self._after_loss = 0

    def step(
        self, model: nn.Module, task: Any, batch: Batch, compute: torch.dtype | None
    ) -> tuple[int, int, int, int]:
        """Return the numbers of `Activations` for the whole batch."""
        context = nullcontext() if compute is None else torch.autocast("cpu", dtype=compute)
        sizes: list[int] = []  # of the output; of all before the loss; of the loss

        def end_loss(gradient: torch.Tensor) -> None:
            sizes.append(max(0, self._of_loss - sizes[1]))
            self._of_loss = self._after_loss = 0

        def note(module: nn.Module, args: Any, result: Any) -> None:
            gc.collect()  # selective checkpointing leaves circles of references behind
            self.peak = self._now()
            outputs = [t for t in tree_leaves(result) if _is_tensor(t)]
            sizes.extend((sum(map(_nbytes, outputs)), self._now()))
            self._of_loss = sizes[1]
            if outputs and outputs[0].requires_grad:
                outputs[0].register_hook(end_loss)

        trained = [p for p in model.parameters() if p.requires_grad]
        handles: list[Any] = [p.register_post_accumulate_grad_hook(self._forget) for p in trained]
        handles.append(model.register_forward_hook(note))
        try:
            with context:
                loss = task(model, batch)["loss"][0]
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        output, of_loss = sizes[0], sizes[2] if len(sizes) > 2 else 0
        saved = sizes[1] - output
        return self.peak, output + of_loss, saved, max(0, self._after_loss - saved)

    def _forget(self, parameter: torch.Tensor) -> None:
        """Leave out a gradient as soon as it is one."""
        parameter.grad = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all operations only ask for it
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _key(args[0]) in self._states:
            # It is a copy of a parameter in the format of the computation.
            self._states.add(_key(out))
            self._held.append(StorageWeakRef(out.untyped_storage()))
        new = False
        for leaf in tree_leaves(out):
            if not _is_tensor(leaf) or (key := _key(leaf)) in self._states:
                continue
            if key not in self._storages:
                self._storages[key] = StorageWeakRef(leaf.untyped_storage()), _nbytes(leaf)
                new = True
        if new:
            now = self._now()
            self.peak = max(self.peak, now)
            self._after_loss = max(self._after_loss, now)
            if self._of_loss:
                self._of_loss = max(self._of_loss, now)
        return out

    def _now(self) -> int:
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in gone:
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
