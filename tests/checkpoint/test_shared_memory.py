"""The memory of background saves is pinned by one owner; a stub stands for CUDA's runtime.

No GPU is needed: the stub keeps ranges of addresses, as the driver does. What a copy by CUDA does
with an address that is pinned no more, only a GPU can show.
"""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpctrain.engine.checkpoint.saving import shared_memory
from hpctrain.engine.checkpoint.saving.shared_memory import SharedMemory, end_of, places, sampled

MIB = 1 << 20


class Driver:
    """A stub of CUDA's runtime, which knows pinned memory by its addresses."""

    def __init__(self) -> None:
        self.pinned, self.refused, self.full = dict[int, int](), list[int](), False

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        if self.full:
            return 2  # cudaErrorMemoryAllocation
        if any(at < other + many and other < at + size for other, many in self.pinned.items()):
            self.refused.append(at)
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[at] = size
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        maps = Path("/proc/self/maps").read_text()
        ranges = [line.split()[0].split("-") for line in maps.splitlines()]
        assert any(int(a, 16) <= at < int(b, 16) for a, b in ranges), "it was unmapped before"
        return 0 if self.pinned.pop(at, None) else 713


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, ones = Driver(), torch.ones
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: ones(*sizes))
    return made


def test_cuda_forgets_the_memory_before_it_is_unmapped(driver: Driver) -> None:
    """A process may train again, and its next memory then often has the same address."""
    for _ in range(3):
        memory = SharedMemory()
        memory.reserve(16 * MIB)
        memory.reserve(32 * MIB)
        assert [*driver.pinned.values()] == [32 * MIB]
        memory.unpin()
        assert driver.pinned == {}
        memory.unpin()
    SharedMemory()  # nobody has unpinned it, as after an error
    assert driver.pinned == {}
    assert driver.refused == []


def test_memory_that_cuda_refuses_is_filled_by_the_host(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.full = True
    with caplog.at_level(logging.WARNING):
        memory = SharedMemory()
    assert "CUDA refuses to pin the 0.0 MiB that checkpoints are copied to" in caplog.text
    assert "error 2" in caplog.text
    taken, cpu = list[torch.Tensor](), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (taken.append(t), cpu(t))[1])
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    tensors = [torch.ones(3)]
    memory.reserve(2 * MIB)
    memory.put(tensors, places(tensors), b"")
    assert taken[0] is tensors[0]
    assert sampled(place.within(memory.bytes()) for place in places(tensors)) == sampled(tensors)


def test_what_is_sampled_is_equal_for_equal_tensors_alone() -> None:
    drawn = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0))
    kinds = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128
    tensors = [drawn.to(kind) for kind in kinds]
    tensors += [drawn.permute(2, 0, 1), drawn[:, 1:3], drawn[:0], drawn[0, 0, 0]]
    tensors += [drawn[0].expand(2, 5, 3)]
    memory = SharedMemory()
    placed = places(tensors)
    memory.reserve(end_of(placed))
    memory.put(tensors, placed, b"")
    targets = [place.within(memory.bytes()) for place in placed]
    assert sampled(targets) == sampled(tensors)
    for target in filter(torch.Tensor.numel, targets):
        before = sampled([target])
        target.copy_(~target if target.dtype == torch.bool else 2 * target.cdouble().abs().add(1))
        assert sampled([target]) != before, target.dtype


class There(torch.Tensor):
    """Bytes that say that they are on a GPU."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_what_is_sampled_leaves_a_gpu_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of Adam are on the host, between the tensors that are on the GPU."""
    tensors = [torch.randn(n % 3 * 100, dtype=torch.float64) for n in range(12)]
    expected, chosen = sampled(tensors), shared_memory._chosen
    assert expected != sampled(reversed(tensors))
    copied, cpu = list[int](), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (copied.append(len(t)), cpu(t))[1])

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        here = chosen(tensor)
        return here if len(tensor) == 100 else here.as_subclass(There)  # type: ignore[no-any-return]

    monkeypatch.setattr(shared_memory, "_chosen", placed)
    assert sampled(tensors) == expected
    assert copied == [8 * 4 * 67, 8 * 4 * 100]
