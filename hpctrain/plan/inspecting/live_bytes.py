"""The bytes that live in a step of training: tensors that operations return, beside parameters."""

import gc
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.shards.types import Batch


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a whole batch in one step."""

    saved: int  # by all blocks when the forward pass ends, without the outputs
    outputs: int
    loss: int  # the outputs, and what the loss needs until their gradient is there
    # Beside `saved`, after each operation from then on that returns a new tensor. Gradients of
    # parameters are among them only while they are computed.
    backward: list[int]


def step_bytes(model: nn.Module, task: Any, batch: Batch, compute: torch.dtype | None) -> StepBytes:
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
    return StepBytes(saved, outputs, max([outputs, *above[:end]]), above[end:])


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
