"""Memory that a rank shares with the process that writes its checkpoints.

    [ report | tensor | tensor | ... | the job, pickled ]

It is one file in memory (memfd), so that a model of thousands of tensors needs one descriptor, and
a small /dev/shm does not limit it. It is made once, and again only if a state has grown.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_REPORT, _ALIGNED = 4096, 64  # bytes


@dataclass(frozen=True)
class Placed:
    """A tensor in the shared memory, which begins at the byte `offset`."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def within(self, content: mmap.mmap) -> torch.Tensor:
        """Return the tensor, whose storage has its own bytes alone, as torch.save needs it."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        own = torch.frombuffer(content, dtype=torch.uint8, count=self.size, offset=self.offset)
        return torch.as_strided(own.view(self.dtype), self.shape, self.stride)


class SharedMemory:
    """New memory of `size` bytes, or that of a rank as its writer sees it, at a `path` of /proc.

    On a GPU it is pinned, unless CUDA refuses that, and copies to it do not wait for each other.
    """

    def __init__(self, size: int, path: str = "") -> None:
        if path:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        else:
            self.descriptor = os.memfd_create("hpctrain-checkpoint")
            os.posix_fallocate(self.descriptor, 0, size)  # else a node without memory sends SIGBUS
        self.content = mmap.mmap(self.descriptor, size)  # 0 is all of it
        self._pinned = 0
        if torch.cuda.is_initialized():
            address = torch.frombuffer(self.content, dtype=torch.uint8, count=1).data_ptr()
            if not int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
                self._pinned = address

    def close(self) -> None:
        """Give the memory back; another one has taken its place."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        os.close(self.descriptor)

    @property
    def report(self) -> str | None:
        """Why the job has failed, "" if it has not; None while the writer has not done it."""
        text = self.content[1:_REPORT].rstrip(b"\0").decode(errors="replace")
        return text if self.content[0] else None

    @report.setter
    def report(self, text: str | None) -> None:
        self.content[1:_REPORT] = (text or "").encode()[: _REPORT - 1].ljust(_REPORT - 1, b"\0")
        self.content[0] = text is not None

    def put(self, tensors: Sequence[torch.Tensor], placed: Sequence[Placed], rest: bytes) -> None:
        """Copy tensors to their places, and `rest` behind them; return when all is there.

        The report is None then.
        """
        self.report = None
        for tensor, place in zip(tensors, placed, strict=True):
            place.within(self.content).copy_(tensor, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        begin = end_of(placed)
        self.content[begin : begin + len(rest)] = rest


def places(tensors: Sequence[torch.Tensor]) -> list[Placed]:
    """Return a place for each of the tensors, with the strides that its copy would have."""
    found, offset = list[Placed](), _REPORT
    for tensor in tensors:
        stride = torch.empty_like(tensor, device="meta").stride()
        found.append(Placed(offset, tensor.dtype, tuple(tensor.shape), stride))
        offset = end_of(found)
    return found


def end_of(placed: Sequence[Placed]) -> int:
    """Return the first byte behind the places that can be used."""
    end = placed[-1].offset + placed[-1].size if placed else _REPORT
    return -(-end // _ALIGNED) * _ALIGNED
