"""Memory that a rank shares with the process that writes its checkpoints.

    [ report | tensor | tensor | ... | the job, pickled ]

It is one file in memory, so that a model of thousands of tensors needs one descriptor, and a small
/dev/shm does not limit it. It is made once, and grows only if a state has grown.

CUDA pins memory by its address, and forgets it only when it is told to. Where memory is unmapped
before, the next one may get the same address, and a copy to it may go to pages that nobody reads.
So only this class pins the memory, and it tells CUDA before the memory is unmapped.
"""

import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128

from hpctrain.base.units import readable
from hpctrain.data.workers.shared import ALIGNMENT, Segment

log = logging.getLogger(__name__)
_REPORT = 4096  # bytes
_ELEMENTS = 64  # of each tensor, at least, that `sampled` looks at
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Placed:
    """A tensor in the shared memory, which begins at the byte `offset`."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.dtype.itemsize * torch.Size(self.shape).numel()

    def within(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Return the tensor, whose storage has its own bytes alone, as torch.save needs it."""
        own = torch.from_numpy(memory[self.offset : self.end])
        return torch.as_strided(own.view(self.dtype), self.shape, self.stride)


class SharedMemory(Segment):
    """New memory of a rank, or that of a descriptor, as its writer sees it.

    On a GPU it is pinned, and copies to it do not wait for each other. If CUDA refuses that, each
    tensor goes through memory of torch's, and CUDA never sees an address of this one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(descriptor)
        self._unpin: weakref.finalize[..., Any] | None = None  # None: it is not pinned
        self.reserve(_REPORT)

    def reserve(self, size: int) -> None:
        """Make at least `size` bytes usable; an OSError if the node has not so many."""
        if self._map is not None and len(self._map) >= size:
            return
        self.unpin()
        try:
            super().reserve(size)
        finally:
            if self._map is not None and torch.cuda.is_initialized():
                self._pin()

    def _pin(self) -> None:
        memory, runtime = self.bytes(), torch.cuda.cudart()
        address = memory.ctypes.data
        if code := int(runtime.cudaHostRegister(address, len(memory), 0)):
            # CUDA keeps the error, and torch would raise it at the training's next kernel.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
            log.warning(
                "CUDA refuses to pin the %s that checkpoints are copied to (cudaHostRegister: "
                "error %d): saves stop the training for longer",
                *(readable(len(memory)), code),
            )
            return
        self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
        self._unpin.atexit = False  # the end of the process does it

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA knows the memory, and copies straight to it."""
        return self._unpin is not None

    def unpin(self) -> None:
        """Let CUDA forget the memory, which may be unmapped then."""
        if self._unpin is not None:
            self._unpin()
        self._unpin = None

    @property
    def report(self) -> str | None:
        """Why the job has failed, "" if it has not; None while the writer has not done it."""
        memory = self.bytes()
        if not memory[0]:  # before the text, which the writer writes first
            return None
        return memory[1:_REPORT].tobytes().rstrip(b"\0").decode(errors="replace")

    @report.setter
    def report(self, text: str | None) -> None:
        content = (text or "").encode()[: _REPORT - 1].ljust(_REPORT - 1, b"\0")
        memory = self.bytes()
        memory[1:_REPORT] = np.frombuffer(content, np.uint8)
        memory[0] = text is not None

    def put(self, tensors: Sequence[torch.Tensor], placed: Sequence[Placed], rest: bytes) -> None:
        """Copy tensors to their places, and `rest` behind them; return when all is there."""
        memory, begin = self.bytes(), end_of(placed)
        for tensor, place in zip(tensors, placed, strict=True):
            if not self.is_pinned:
                tensor = tensor.cpu()
            place.within(memory).copy_(tensor, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        memory[begin : begin + len(rest)] = np.frombuffer(rest, np.uint8)


def sampled(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return the digest of some bits of each tensor: equal for equal tensors, on any device.

    The bits of all tensors leave a GPU in one copy, because each copy waits for the device.
    """
    chosen = [*map(_chosen, tensors)]
    alike: dict[torch.device, list[int]] = {}
    for index, bits in enumerate(chosen):
        alike.setdefault(bits.device, []).append(index)
    for indices in alike.values():
        parts = [chosen[index] for index in indices]
        copied = torch.cat(parts).cpu().split([len(part) for part in parts])
        for index, part in zip(indices, copied, strict=True):
            chosen[index] = part
    digest = xxh3_128()
    for bits in chosen:
        digest.update(bits.numpy().tobytes())
    return digest.digest()


def _chosen(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of a tensor's bytes, on its device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits, step = tensor.view(_INTEGERS[tensor.itemsize]), max(1, tensor.numel() // _ELEMENTS)
    return bits.take(torch.arange(0, bits.numel(), step, device=bits.device)).view(torch.uint8)


def places(tensors: Sequence[torch.Tensor]) -> list[Placed]:
    """Return a place for each of the tensors, with the strides that its copy would have."""
    found = list[Placed]()
    for tensor in tensors:
        stride = torch.empty_like(tensor, device="meta").stride()
        found.append(Placed(end_of(found), tensor.dtype, tuple(tensor.shape), stride))
    return found


def end_of(placed: Sequence[Placed]) -> int:
    """Return the first byte behind the places that can be used."""
    end = placed[-1].end if placed else _REPORT
    return -(-end // ALIGNMENT) * ALIGNMENT
