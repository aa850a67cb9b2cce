"""Counts the live bytes of tensors on the CPU, whose allocator has no statistics."""

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 1024


class Live(TorchDispatchMode):
    """Sees every tensor that an operation returns, also in the backward pass.

    Each storage is counted once, with its present size: FSDP2 frees and fills the same storage
    again without an operation. What an operation allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        grown = [self.watch(leaf) for leaf in leaves]
        if any(grown) or func.namespace in ("fsdp", "c10d"):
            self.peak = max(self.peak, self.now())
        return out

    def watch(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor from now on; return whether it is a new one."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, AsyncCollectiveTensor):  # its views have no memory of their own
            tensor = tensor.elem
        storage = tensor.untyped_storage()
        known = storage._cdata in self._storages
        if known or tensor.device.type == "meta" or 0 < storage.nbytes() < SMALL:
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return True

    def now(self) -> int:
        """Return the bytes of all storages that are alive."""
        total = 0
        for key in list(self._storages):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)  # type: ignore[attr-defined]
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def restart(self) -> None:
        """Set the peak to the present number of bytes."""
        self.peak = self.now()
