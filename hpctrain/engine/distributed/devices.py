"""The device of each rank: the CPU, or one of the GPUs that it sees.

    every rank   "cpu", or the UUIDs of the GPUs that it sees ──┐  in the store, before the
    rank 0       compares those of all ranks                 ◀──┘  process group is made
    every rank   reads the index of its GPU, or why the ranks do not fit together

Ranks of one node see the same GPUs, and each takes one of them; or each rank sees GPUs of its own,
and takes the first one. A count of GPUs cannot tell these apart, but UUIDs can. If ranks with GPUs
and ranks without any formed a group, it would hang: they use different backends.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import ConfigError, DistributedError, NoGpuError
from hpctrain.base.processes import gpu_driver
from hpctrain.base.processes.causes import one_line
from hpctrain.base.terminal.terminal import few
from hpctrain.base.units import GIB
from hpctrain.cluster.ranks.ranks import RankInfo, gpus_given

log = logging.getLogger(__name__)
_PATIENCE = timedelta(seconds=20)  # then the ranks that are waited for are named
_TELLING_S = 10.0  # rank 0 serves the store, so it does not end before the others know why
CONTEXT_BYTES = GIB  # of a GPU's memory, for a process: CUDA's context, and NCCL's buffers
_SHOWN = 8  # ranks that are named in an error
# Slurm sets one of these if the step or the job has GPUs on this node.
_ALLOCATED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
# Who sets one of these to nothing wants no GPU.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NOTHING = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Seen:
    """What one rank says about its devices.

    `gpus` are the identities of those that it sees, by index; none if it uses the CPU. `problem`
    tells why it has no device; "" if it has one. `mig` tells whether it sees a slice of a GPU.
    `given` is how many GPUs the job has on the host; 0 if that is not known.
    """

    host: str
    gpus: list[str]
    problem: str = ""
    mig: bool = False
    given: int = 0


@dataclass(frozen=True)
class _Answer:
    """What rank 0 says to all ranks: the index of the GPU of each, or why there is no group."""

    indices: list[int]
    problem: str = ""
    late: bool = False
    short: Sequence[str] = ()  # hosts that show fewer GPUs than the job has there


def kind(setting: str, gpus_per_node: int = 0, env: Mapping[str, str] = os.environ) -> str:
    """Return "cuda" or "cpu", the kind of device that this rank uses, by `parallel.device`.

    If torch sees no GPU, but the config or the Slurm job asks for one, or torch is built for GPUs
    and the host has their driver, it is a NoGpuError.
    """
    if setting == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    allocated = [f"{name}={env[name]}" for name in _ALLOCATED if env.get(name)]
    driver = gpu_driver.driver() if torch.version.cuda or torch.version.hip else ""
    if setting != "cuda" and not (gpus_per_node or allocated or (driver and not _hidden(env))):
        return "cpu"
    raise _missing(setting, gpus_per_node, allocated, driver, env)


def _missing(
    setting: str, gpus_per_node: int, allocated: list[str], driver: str, env: Mapping[str, str]
) -> NoGpuError:
    """Return the error that there is no GPU, though there is a reason to use one."""
    reason = f"this host has {driver}"
    if setting == "cuda":
        reason = "parallel.device=cuda"
    elif gpus_per_node:
        reason = f"launch.gpus_per_node={gpus_per_node}"
    elif allocated:
        reason = f"the job has GPUs ({allocated[0]})"
    why = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', 'unset')!r}{_no_gpu()}"
    cure = "" if setting == "cuda" else "; parallel.device=cpu trains on the CPU"
    if "SLURM_JOB_ID" in env and not (gpus_per_node or allocated):
        cure = f"; launch.gpus_per_node asks Slurm for GPUs{cure}"
    host = socket.gethostname()
    error = NoGpuError(f"{reason}, but torch sees no GPU here, on {host} ({why}){cure}")
    error.hosts = [host]
    return error


def _hidden(env: Mapping[str, str]) -> bool:
    return any(env.get(name, "0").strip() in _NOTHING for name in _VISIBLE)


def unused_gpu() -> str:
    """Return why torch uses no GPU though this host has a driver for one; "" if none is meant."""
    unused = gpu_driver.driver() and not _hidden(os.environ) and not torch.cuda.is_available()
    return _no_gpu().removeprefix("; ") if unused else ""


def _no_gpu() -> str:
    """Return why torch sees no GPU, as far as the driver, the build of torch and CUDA tell it."""
    cuda, hip = torch.version.cuda, torch.version.hip
    if found := gpu_driver.mismatch(torch.__version__, cuda, hip):
        return f"; {found}"
    if not (cuda or hip):
        return f"; torch {torch.__version__} is built for CPUs only"
    said = [gpu_driver.driver() or "no driver of a GPU is loaded"]
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said.append(str(error).partition("\n")[0])
    if gpu_driver.driver() and "no NVIDIA driver" in said[-1]:
        said.append("a container needs --nv (launch.gpus_per_node) to see it")
    return "".join(f"; {each}" for each in said)


def agree(
    store: dist.Store, ranks: RankInfo, setting: str, gpus_per_node: int, *, share: bool = False
) -> torch.device:
    """Return the device of this rank, which fits to those of all other ranks. All ranks call it.

    A GPU becomes torch's current device; with `share` it may be that of other ranks, too.

    Raises:
        NoGpuError: A GPU is required but there is none, or the devices of the ranks do not fit
            together; the text names the ranks and their nodes.
        DistributedError: Some ranks do not come.
    """
    seen = _look(setting, gpus_per_node, says=ranks.is_main)
    answer = _Answer([0], seen.problem)
    if ranks.world_size > 1:
        answer = _answered(store, ranks, seen, share)
    if answer.problem:
        no_gpu = NoGpuError(seen.problem or answer.problem)
        no_gpu.hosts = answer.short if ranks.world_size > 1 else _short([seen])
        raise no_gpu
    if not seen.gpus:
        return torch.device("cpu")
    device = torch.device("cuda", answer.indices[ranks.rank])
    torch.cuda.set_device(device)
    return device


def _look(setting: str, gpus_per_node: int, *, says: bool) -> Seen:
    """Return what this rank sees, and with `says` log why it uses no GPU."""
    host, given = socket.gethostname(), 0 if setting == "cpu" else gpus_given(gpus_per_node)
    try:
        chosen = kind(setting, gpus_per_node)
        if says and setting != "cpu" and (found := unused_gpu()):
            log.warning("the CPU trains: %s; parallel.device=cpu says that it shall", found)
        # The name of a slice is such as NVIDIA A100-SXM4-40GB MIG 1g.5gb.
        mig = chosen == "cuda" and " MIG " in torch.cuda.get_device_name(0)
        return Seen(host, visible(chosen), mig=mig, given=given)
    except ConfigError as error:
        return Seen(host, [], str(error), given=given)
    except (RuntimeError, AssertionError) as error:  # CUDA counts a GPU that does not answer
        problem = f"CUDA cannot use the GPUs here, on {host} ({one_line(str(error))})"
        return Seen(host, [], problem, given=given)


def _answered(store: dist.Store, ranks: RankInfo, seen: Seen, share: bool) -> _Answer:
    """Return what rank 0 says to what all ranks have seen."""
    store.set(_key(ranks.rank), json.dumps(asdict(seen)))
    if ranks.is_main:
        store.set("devices/answer", json.dumps(asdict(_compare(store, ranks, share))))
    answer = _Answer(**json.loads(store.get("devices/answer")))
    if not answer.problem:
        return answer
    told = store.add("devices/told", 1)
    end = time.monotonic() + _TELLING_S
    while ranks.is_main and told < ranks.world_size and time.monotonic() < end:
        time.sleep(0.05)
        told = store.add("devices/told", 0)
    if answer.late:
        raise DistributedError(answer.problem)
    if answer.short and not ranks.is_main:
        # The end of this rank ends rank 0, too, which may have to requeue the job before.
        with suppress(RuntimeError):
            store.wait(["devices/end"], timedelta(seconds=_TELLING_S))
    return answer


def assign(seen: Sequence[Seen], *, share: bool = False) -> list[int]:
    """Return for each rank the index of its GPU among those that it has `seen`; 0 on CPUs.

    A rank without a device, and GPUs on some ranks only, are a ConfigError; so are a GPU of two
    ranks, and slices of GPUs for several ranks, unless they may `share`.
    """
    if wrong := [rank for rank, one in enumerate(seen) if one.problem]:
        raise ConfigError(f"{_named(wrong, seen)}: {seen[wrong[0]].problem}")
    without = [rank for rank, one in enumerate(seen) if not one.gpus]
    if without and len(without) < len(seen):
        having = [rank for rank, one in enumerate(seen) if one.gpus]
        raise ConfigError(
            f"torch sees no GPU on {_named(without, seen)}, but it does on {_named(having, seen)}: "
            "exclude the node (+site.sbatch.exclude=NODE), or train on CPUs (parallel.device=cpu)"
        )
    slices = [rank for rank, one in enumerate(seen) if one.mig]
    if slices and len(seen) > 1 and not share:
        raise ConfigError(
            f"{_named(slices, seen)}: NCCL does not connect slices of GPUs (MIG), and CUDA shows a "
            "process only one. Start one rank (launch.tasks_per_node=1), such as one run of a "
            "sweep for each slice, or use whole GPUs; parallel.backend=gloo is slow, but can"
        )
    indices, owners = [0] * len(seen), dict[str, int]()
    alike: dict[frozenset[str], list[int]] = {}
    for rank, one in enumerate(seen):
        alike.setdefault(frozenset(one.gpus), []).append(rank)
    for gpus, members in alike.items():
        if not gpus:
            break
        if len(members) > len(gpus) and not share:
            raise ConfigError(
                f"{_named(members, seen)} see the same {len(gpus)} GPU{'s'[: len(gpus) - 1]}: each "
                "rank needs one of its own; start fewer ranks (launch.tasks_per_node), or let the "
                "job have more GPUs (launch.gpus_per_node, site.gpu_option); only "
                "parallel.backend=gloo lets ranks share one"
            )
        # The lists of two ranks may have different orders.
        for rank, gpu in zip(members, cycle(seen[members[0]].gpus), strict=False):
            if (owner := owners.setdefault(gpu, rank)) != rank and not share:
                raise ConfigError(
                    f"{_named([owner, rank], seen)} would share the GPU {gpu}: their "
                    "CUDA_VISIBLE_DEVICES overlap; ranks see either the same GPUs or none of each "
                    "other's"
                )
            indices[rank] = seen[rank].gpus.index(gpu)
    return indices


def keep_to_share(share: float, device: torch.device) -> None:
    """Let torch allocate at most a share of the memory of a GPU, which others use, too.

    What CUDA itself takes for this process is part of the share, but not of torch's limit. A share
    that is not larger than that is a ConfigError.
    """
    size = torch.cuda.get_device_properties(device).total_memory
    if share * size <= CONTEXT_BYTES:
        raise ConfigError(
            f"launch.gpus_per_run={share:g}: of this GPU that is {share * size / GIB:.1f} GiB, and "
            f"CUDA itself takes {CONTEXT_BYTES / GIB:g} GiB; let fewer runs share a GPU"
        )
    torch.cuda.set_per_process_memory_fraction(share - CONTEXT_BYTES / size, device)


def _compare(store: dist.Store, ranks: RankInfo, share: bool) -> _Answer:
    keys = [_key(rank) for rank in range(ranks.world_size)]
    with suppress(RuntimeError):  # the timeout
        store.wait(keys, min(_PATIENCE, store.timeout / 2))  # type: ignore[attr-defined]
    if late := _late(store, ranks):
        log.warning(
            "%s waits for %s at %s:%d: were they started, and do the nodes reach each other? "
            "HPCTRAIN_LAUNCHER=single trains with this process alone",
            *(ranks, late, ranks.master_addr, ranks.master_port),
        )
    try:
        seen = [Seen(**json.loads(store.get(key))) for key in keys]
        return _Answer(assign(seen, share=share))
    except ConfigError as error:
        return _Answer([], str(error), short=_short(seen))
    except RuntimeError:  # the timeout of the store
        if not (late := _late(store, ranks)):
            raise
        return _Answer([], f"{late} did not come to the start in time", late=True)


def _short(seen: Sequence[Seen]) -> list[str]:
    """Return the hosts on which the ranks together see fewer GPUs than the job has there."""
    found: dict[str, set[str]] = {}
    for one in seen:
        found.setdefault(one.host, set()).update(one.gpus)
    return sorted({one.host for one in seen if len(found[one.host]) < one.given})


def _late(store: dist.Store, ranks: RankInfo) -> str:
    """Return the ranks that have said nothing yet; "" if all have."""
    late = [rank for rank in range(ranks.world_size) if not store.check([_key(rank)])]
    return _named(late, {rank: Seen(ranks.host(rank), []) for rank in late}) if late else ""


def visible(device: str) -> list[str]:
    """Return the identities of the GPUs that torch sees, by index; none for "cpu".

    An identity is the UUID. Two dies of a board of AMD may have the same, so there the PCI address
    follows it: `UUID@0000:c1:00`.
    """
    if device == "cpu":
        return []
    # This creates no context on the GPUs, which would take memory on each.
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [_identity(one) for one in every]


def _identity(gpu: Any) -> str:
    if torch.version.hip is None:
        return str(gpu.uuid)
    return f"{gpu.uuid}@{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"


def job_gpus(device: torch.device) -> list[str]:
    """Return the identities of the GPUs of the job that this rank knows.

    Slurm shows a job its own GPUs, so they are all that this rank sees. Outside of Slurm a rank may
    see GPUs that somebody else uses; only the one that it was given counts.
    """
    seen = visible(device.type)
    if not seen or any(os.environ.get(name) for name in _ALLOCATED):
        return seen
    return [seen[device.index or 0]]


def _key(rank: int) -> str:
    return f"devices/{rank}"


def _named(members: Sequence[int], seen: Sequence[Seen] | Mapping[int, Seen]) -> str:
    names = few((f"{rank} ({seen[rank].host})".removesuffix(" ()") for rank in members), _SHOWN)
    return f"{'rank' if len(members) == 1 else 'ranks'} {names}"
