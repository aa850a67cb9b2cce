"""A group of one rank over NCCL: it is made, it reduces, it ends."""

import torch
from torch import distributed

from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.distributed.group import process_group
from tests.gpu.device import DEVICE, REHEARSAL, on_device
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
