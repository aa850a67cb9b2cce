"""Tests of the region of a tensor that a rank has."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hpctrain.engine.distributed.tensors import own_region


def divided(rows: int, rank: int, dp: int, tp: int) -> DTensor:
    """Return rows that tensor parallel divides first, and FSDP2 then, without other ranks."""
    mesh = DeviceMesh("cpu", torch.arange(dp * tp).view(dp, tp), _init_backend=False, _rank=rank)
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    shape = torch.Size([rows, 2])
    none = torch.empty(0, 2)
    return DTensor.from_local(none, mesh, placements, run_check=False, shape=shape, stride=(2, 1))


@pytest.mark.parametrize("rows", [12, 13, 7, 1])
def test_the_ranks_have_the_parts_that_torch_gives_them(rows: int) -> None:
    """torch's own function for it has other rows where tensor parallel divides unevenly."""
    dp, tp = 3, 2
    parts = [part.chunk(dp) for part in torch.arange(rows).chunk(tp)]
    for rank in range(dp * tp):
        data, place = divmod(rank, tp)
        column = parts[place] if place < len(parts) else ()
        expected = column[data].tolist() if data < len(column) else []
        found = torch.arange(rows)[own_region(divided(rows, rank, dp, tp))[0]]
        assert found.tolist() == expected, rank


def test_a_plain_tensor_is_whole() -> None:
    assert own_region(torch.empty(3, 0)) == (slice(0, 3), slice(0, 0))
