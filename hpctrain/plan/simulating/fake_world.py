"""A world of any number of ranks, of which this process is one and the others do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.parallel.reducing.lockstep import Lockstep
from hpctrain.parallel.wrappers import parallel_model
from hpctrain.tasks.task import Sums


def enter(rank: int, world: int) -> None:
    """Make this process a rank of a world whose other ranks do not exist."""
    leave()
    debug._clear_sharding_prop_cache()  # the cache remembers the rank
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def leave() -> None:
    """End the world, if there is one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def without_values() -> Iterator[None]:
    """Let a step run on tensors that have no values.

    A training reads values in two places. The ranks agree on their next block in the first step:
    here all have the same. And on a CPU the sums of a loss are numbers: here they stay tensors.
    """

    def agreed(_: Any, number: int) -> int:
        return number

    def flat(sums: Sums) -> torch.Tensor:
        return torch.stack([torch.as_tensor(v).double() for pair in sums.values() for v in pair])

    with patch.object(Lockstep, "_agreed", agreed), patch.object(parallel_model, "flat", flat):
        yield
