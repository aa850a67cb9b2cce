"""The process group: rendezvous of the ranks, and orderly end.

    with process_group(ranks, config.parallel) as device:
        ...   # all ranks have joined

A single process forms a group of one rank, so no later code needs to handle that case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.config.schema import ParallelConfig
from hpctrain.distributed import long_work
from hpctrain.distributed.cores import threads
from hpctrain.distributed.devices import agree
from hpctrain.distributed.ending import leave_group_open
from hpctrain.distributed.port import check_port
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import DistributedError


@contextmanager
def process_group(
    ranks: RankInfo, config: ParallelConfig, cpus_per_task: int = 1, gpus_per_node: int = 0
) -> Iterator[torch.device]:
    """Join the group of all ranks, and leave it in an orderly way.

    After an exception, the group of several ranks stays open: see `hpctrain.distributed.ending`.

    Args:
        ranks: This process's place in the job.
        config: Device, backend and timeout of collectives.
        cpus_per_task: The cores of this rank, for torch's threads (`hpctrain.distributed.cores`).
        gpus_per_node: The config key `launch.gpus_per_node`.

    Yields:
        The device of this rank.

    Raises:
        ConfigError: The devices of the ranks do not fit together (`hpctrain.distributed.devices`).
        DistributedError: The port is taken, or other ranks do not join.
    """
    if (count := threads(ranks, cpus_per_task)) is not None:
        torch.set_num_threads(count)
    timeout = timedelta(seconds=config.timeout_s)
    # Groups that are made later, such as those of a mesh, would wait for torch's 10 or 30 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    try:
        store = _store(ranks, timeout)
        device = agree(store, ranks, config.device, gpus_per_node)
        dist.init_process_group(
            _backend(config.backend, device),
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
        _connect(device)
    except (RuntimeError, ValueError) as error:  # DistStoreError and similar ones are RuntimeErrors
        _after_failure(ranks)
        raise DistributedError(
            f"{ranks}: no process group at {ranks.master_addr}:{ranks.master_port} within "
            f"{config.timeout_s} s ({str(error).splitlines()[0]})"
        ) from error
    try:
        with long_work.use(long_work.Group(store, ranks.rank, ranks.world_size, config.timeout_s)):
            yield device
        # Without it, rank 0 may end the store while other ranks still use it.
        dist.barrier()
    except BaseException:
        _after_failure(ranks)
        raise
    dist.destroy_process_group()


def _backend(setting: str, device: torch.device) -> str:
    if setting != "auto":
        return setting
    # gloo handles tensors on the CPU, also on ranks that use NCCL for the GPU.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _connect(device: torch.device) -> None:
    """Connect the ranks now: NCCL does it at the first operation, and only then tells problems.

    With `init_process_group(device_id=…)` NCCL would connect in there. But then torch also splits
    all later groups off this one. So `new_group(…, backend="gloo")` hangs in the ranks that are not
    part of the new group, and single sends share the connections of all other operations.
    """
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _after_failure(ranks: RankInfo) -> None:
    """Let the program go on after an error if it has no other ranks, such as a notebook."""
    if ranks.world_size > 1:
        leave_group_open()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _store(ranks: RankInfo, timeout: timedelta) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    # Under torchrun, the agent of node 0 already serves a store at this address.
    agent = ranks.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    serves = ranks.is_main and agent != "True"
    if serves:
        check_port(ranks.master_port)
    store = dist.TCPStore(
        ranks.master_addr,
        ranks.master_port,
        ranks.world_size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
    )
    restart = ranks.restart_count
    return dist.PrefixStore(f"hpctrain/{ranks.job_id}/{restart}", store)
