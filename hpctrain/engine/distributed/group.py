"""The process group: rendezvous of the ranks, and orderly end.

    with process_group(ranks, config.parallel, config.launch, run.path) as device:
        ...   # all ranks have joined, and know the secret of the run

A single process forms a group of one rank, so no later code needs to handle that case.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.base.errors import DistributedError, JoinError
from hpctrain.base.processes.causes import one_line
from hpctrain.base.processes.cgroup import cores
from hpctrain.cluster.ranks import run_secret
from hpctrain.cluster.ranks.leaving import end_at_once, leave_group_open
from hpctrain.cluster.ranks.port import keep_alive, listen
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import LaunchConfig, ParallelConfig
from hpctrain.engine.distributed import long_work, members
from hpctrain.engine.distributed.devices import agree, keep_to_share

log = logging.getLogger(__name__)
_ONE_CORE = LaunchConfig()
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of parallel.backend=auto


@contextmanager
def process_group(
    ranks: RankInfo,
    config: ParallelConfig,
    launch: LaunchConfig = _ONE_CORE,
    folder: Path | None = None,
) -> Iterator[torch.device]:
    """Join the group of all ranks, and leave it in an orderly way.

    After an exception, the group of several ranks stays open: see `hpctrain.cluster.ranks.leaving`.

    `folder` is the run directory, for the secret of the run; None only for a single process. Yields
    the device of this rank.

    Raises:
        ConfigError: The devices of the ranks do not fit together (`distributed.devices`).
        JoinError: Ranks do not join.
        DistributedError: The port is taken, or one that is a stranger has joined.
    """
    if (count := threads(ranks, launch.cpus_per_task)) is not None:
        torch.set_num_threads(count)
    several, timeout = ranks.world_size > 1, timedelta(seconds=config.timeout_s)
    # Groups that are made later, such as those of a mesh, would wait for torch's 10 or 30 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    key = _secret(ranks, folder, config.timeout_s) if several else None
    began = time.monotonic()
    try:
        store = dist.HashStore() if key is None else _store(ranks, timeout, key)
        share = config.backend == "gloo"  # NCCL wants one GPU for each rank
        device = agree(store, ranks, config.device, launch.gpus_per_node, share=share)
        if launch.gpus_per_run is not None and device.type == "cuda":
            keep_to_share(launch.gpus_per_run, device)
        dist.init_process_group(
            # gloo handles tensors on the CPU, also on ranks that use NCCL for the GPU.
            config.backend if config.backend != "auto" else _BACKENDS[device.type],
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
        if several:  # a single rank may never need NCCL, which takes time and memory
            _connect(device)
    except (RuntimeError, ValueError) as error:  # DistStoreError and similar ones are RuntimeErrors
        _after_failure(ranks)
        raise _not_joined(ranks, error, time.monotonic() - began) from error
    try:
        with nullcontext() if key is None else _members_only(ranks, key, store, config.timeout_s):
            yield device
        # Without it, rank 0 may end the store while other ranks still use it.
        dist.barrier()
    except BaseException:
        _after_failure(ranks)
        raise
    dist.destroy_process_group()


def _not_joined(ranks: RankInfo, error: Exception, after_s: float) -> JoinError:
    choose = "; if the nodes have several networks, set MASTER_ADDR and network.interface"
    return JoinError(
        f"{ranks}: no process group at {ranks.master_addr}:{ranks.master_port} after "
        f"{after_s:.0f} s ({one_line(str(error))}){choose * (ranks.num_nodes > 1)}"
    )


def _connect(device: torch.device) -> None:
    """Connect the ranks now: NCCL does it at the first operation, and only then tells problems."""
    # With `init_process_group(device_id=…)` torch would split all later groups off this one: then
    # `new_group(…, backend="gloo")` hangs in ranks outside of it, and single sends share links.
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _after_failure(ranks: RankInfo) -> None:
    """Let the program go on after an error if it has no other ranks, such as a notebook."""
    if ranks.world_size > 1:
        leave_group_open()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _secret(ranks: RankInfo, folder: Path | None, timeout_s: float) -> bytes:
    if folder is None:
        raise ValueError("a process group of several ranks needs the folder with its secret")
    return run_secret.make(folder) if ranks.is_main else run_secret.wait_for(folder, timeout_s)


@contextmanager
def _members_only(
    ranks: RankInfo, key: bytes, store: dist.Store, timeout_s: float
) -> Iterator[None]:
    """Check that all ranks know the secret; then sign torch's objects, and wait by the store."""
    try:
        own = members.check(key)
    except RuntimeError as error:
        raise DistributedError(
            f"{ranks}: the ranks could not check each other at {ranks.master_addr}:"
            f"{ranks.master_port} ({one_line(str(error))})"
        ) from error
    group = long_work.Group(store, ranks.rank, ranks.world_size, timeout_s)
    with members.signed_objects(own), long_work.use(group):
        yield


def _store(ranks: RankInfo, timeout: timedelta, key: bytes) -> dist.Store:
    # Under torchrun, the agent of node 0 already serves a store at this address.
    agent = ranks.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    serves = ranks.is_main and agent != "True"
    host = "127.0.0.1" if ranks.one_node else ranks.master_addr
    listening = None
    if serves:
        bound = listen(host, ranks.master_port, ranks.one_node)
        # Where other nodes know another address of this host, they do not reach this one.
        log.info("the ranks meet at %s (%s)", host, bound.getsockname()[0])
        listening = bound.detach()
    store = dist.TCPStore(
        host,
        ranks.master_port,
        ranks.world_size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    # The number of the job is public; a stranger does not find the keys under this name.
    name = run_secret.sign(key, "store", *ranks.attempt_key).hex()
    return dist.PrefixStore(f"hpctrain/{name}", store)


_LEASE_S = 60.0  # after rank 0 has gone; if only its host has, Linux asks for a minute before
_END_S = 5.0
_FOR_EVER = timedelta(days=365)


@contextmanager
def lease(store: dist.Store, rank: int, port: int) -> Iterator[None]:
    """Let this rank end itself in the context, a minute after rank 0 has gone.

    On a node that Slurm has lost, a rank would wait for the others until `parallel.timeout_s`,
    while another step of the job trains the run. A thread waits for a key of the store, in C++
    without Python's lock, so nothing is done during a step.

    `store` is that of the process group, on this port of rank 0.
    """
    key, over = f"lease/{rank}", threading.Event()
    own = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it

    def listen() -> None:
        try:
            own.wait([key], _FOR_EVER)
        except RuntimeError:  # the store has ended with rank 0, or the network is gone
            if not over.wait(_LEASE_S):
                end_at_once("rank 0 has ended or cannot be reached, so this rank ends, too")

    keep_alive(port)
    thread = threading.Thread(target=listen, name="hpctrain-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        with suppress(RuntimeError):
            store.set(key, "end")
        # A thread that comes back while the interpreter ends would abort it.
        thread.join(_END_S)


def threads(ranks: RankInfo, cpus_per_task: int, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of torch's threads for this rank; None when the environment says it.

    CPU affinity: taskset, Slurm       ┐
    CPU quota: docker --cpus, systemd  ├── cores / ranks on this node
    launch.cpus_per_task               ┘

    torch starts one thread per core of the machine in every process. The threads of several ranks
    on one machine then wait for each other, and all ranks become several times slower.

    Under Slurm a rank has got the cores that it has asked for. Elsewhere 1, the default, means its
    share of the cores that there are. OMP_NUM_THREADS counts; torchrun sets it to 1.
    """
    if "OMP_NUM_THREADS" in env:
        return None
    if ranks.launcher == "slurm":
        return cpus_per_task
    share = max(1, cores() // ranks.local_world_size)
    return share if cpus_per_task == 1 else min(share, cpus_per_task)
