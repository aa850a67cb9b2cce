"""A group of one rank over NCCL: it is made, it reduces, it ends."""

import gc

import pytest
import torch
from torch import distributed

from hpctrain.config.schema import LaunchConfig, ParallelConfig
from hpctrain.engine.distributed.devices import CONTEXT_BYTES
from hpctrain.engine.distributed.group import process_group
from hpctrain.engine.supervised.micro_batches import GpuMemory
from tests.gpu.device import DEVICE, REHEARSAL, needs_gpu, on_device
from tests.steps import ALONE

pytestmark = on_device


def test_a_group_of_one_rank_begins_and_ends() -> None:
    for _ in range(2):  # a rollback or a second run in one process makes another group
        with process_group(ALONE, ParallelConfig(device=DEVICE.type)) as device:
            assert device == DEVICE
            if not REHEARSAL:
                backend = distributed.group.WORLD._get_backend(device)  # type: ignore[union-attr]
                assert "NCCL" in type(backend).__name__
            values = torch.arange(5.0, device=device)
            distributed.all_reduce(values)
            distributed.barrier()
            assert values.tolist() == [0, 1, 2, 3, 4]
        assert not distributed.is_initialized()


@needs_gpu
def test_a_process_keeps_to_its_share_of_the_memory() -> None:
    launch = LaunchConfig(gpus_per_node=1, gpus_per_run=0.25)
    total = torch.cuda.get_device_properties(0).total_memory
    room = int(0.25 * total) - CONTEXT_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with process_group(ALONE, ParallelConfig(device="cuda"), launch) as device:
            assert 0.9 * room < GpuMemory().size() <= 1.001 * room
            fits = torch.empty(int(0.9 * room), dtype=torch.uint8, device=device)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(int(0.2 * room), dtype=torch.uint8, device=device)
            del fits
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
