"""The process group: device, rendezvous, orderly teardown.

    with process_group(ranks, config.parallel) as device:
        ...   # every rank is there

A lone process forms a group of one, so that nothing after this line asks whether it is alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain.config.schema import ParallelConfig
from hpctrain.distributed import long_work
from hpctrain.distributed.port import check_port
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError, DistributedError


def choose_device(wanted: str, ranks: RankInfo) -> torch.device:
    """The device of this rank.

    Slurm may show a task all GPUs of the node or, with `--gpus-per-task`, only its own: the mask
    is Slurm's and stays as it is.

    Raises:
        ConfigError: no GPU although one was asked for, or fewer GPUs than ranks.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "parallel.device=cuda, but torch sees no GPU here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')!r})"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count not in (1, ranks.local_world_size) and ranks.local_rank >= count:
        raise ConfigError(
            f"{ranks.local_world_size} ranks on this node, but torch sees {count} GPUs: "
            "launch.tasks_per_node and launch.gpus_per_node must fit"
        )
    device = torch.device("cuda", ranks.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(
    ranks: RankInfo, config: ParallelConfig, cpus_per_task: int = 1
) -> Iterator[torch.device]:
    """Join the group of all ranks; leave it in order.

    Args:
        ranks: this process's place.
        config: device, backend and timeout of collectives.
        cpus_per_task: threads of torch on this rank, where the launcher says nothing.

    Yields:
        The device of this rank.

    Raises:
        DistributedError: the port is taken or the other ranks do not come.
    """
    device = choose_device(config.device, ranks)
    if ranks.launcher != "single" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpus_per_task)
    backend = config.backend
    if backend == "auto":
        # gloo carries what lives on the CPU also where NCCL does the work.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store = _store(ranks, timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # DistStoreError and its kin are RuntimeErrors
        raise DistributedError(
            f"{ranks}: no process group at {ranks.master_addr}:{ranks.master_port} within "
            f"{config.timeout_s} s ({str(error).splitlines()[0]})"
        ) from error
    try:
        with long_work.use(long_work.Group(store, ranks.rank, ranks.world_size, config.timeout_s)):
            yield device
        # Without it, rank 0 may take the store away while others still talk.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _store(ranks: RankInfo, timeout: timedelta) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    # Under torchrun the agent of node 0 already serves a store at this address.
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
