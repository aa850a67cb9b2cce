"""Memory that a rank shares with the process that writes its checkpoints.

    [ report | tensor | tensor | ... | the job, pickled ]

It is one file in memory, so that a model of thousands of tensors needs one descriptor, and a small
/dev/shm does not limit it. It is made once, and grows only if a state has grown.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.workers.shared import ALIGNMENT, Segment

_REPORT = 4096  # bytes


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

    On a GPU it is pinned, unless CUDA refuses that, and copies to it do not wait for each other.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(descriptor)
        self._pinned: torch.Tensor | None = None
        self.reserve(_REPORT)

    def reserve(self, size: int) -> None:
        """Make at least `size` bytes usable; an OSError if the node has not so many."""
        before = self._map
        super().reserve(size)
        if self._map is before or not torch.cuda.is_initialized():
            return
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
        memory = torch.from_numpy(self.bytes())
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
        self._pinned = None if refused else memory
        if refused:
            # CUDA keeps the error, and torch would raise it at the training's next kernel.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")

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
            place.within(memory).copy_(tensor, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        memory[begin : begin + len(rest)] = np.frombuffer(rest, np.uint8)


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
