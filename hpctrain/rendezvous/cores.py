"""The CPU cores that this process may use, and the share of one rank.

    CPU affinity: taskset, Slurm       ┐
    CPU quota: docker --cpus, systemd  ├── cores / ranks on this node ── torch's threads of a rank
    launch.cpus_per_task               ┘

torch starts one thread per core of the machine in every process. The threads of several ranks on
one machine then wait for each other, and all ranks become several times slower.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.rendezvous.ranks import RankInfo


def threads(ranks: RankInfo, cpus_per_task: int, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of torch's threads for this rank; None when the environment says it.

    Under Slurm a rank has got the cores that it has asked for. Elsewhere 1, the default, means its
    share of the cores that there are. OMP_NUM_THREADS counts, unless torchrun has set it by itself.
    """
    if "OMP_NUM_THREADS" in env and not _set_by_torchrun(ranks, env):
        return None
    if ranks.launcher == "slurm":
        return cpus_per_task
    share = max(1, cores() // ranks.local_world_size)
    return share if cpus_per_task == 1 else min(share, cpus_per_task)


def cores(system: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, without those of hyperthreading."""
    cpus = os.sched_getaffinity(0)
    siblings = {_siblings(system, cpu) for cpu in cpus}
    return max(1, math.floor(min(len(siblings), _quota(system))))


def _siblings(system: Path, cpu: int) -> str:
    try:
        return (
            system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        ).read_text()
    except OSError:
        return str(cpu)


def _quota(system: Path) -> float:
    """Return the smallest CPU quota of the control groups of this process, in cores."""
    mount, quotas = system / "sys/fs/cgroup", [math.inf]
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be that of the host, and the limit is at the mount.
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):
                if controllers:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    group = mount / controllers / folder
                    quota, period = ((group / name).read_text() for name in names)
                else:
                    quota, period = (mount / folder / "cpu.max").read_text().split()
                if float(quota) > 0:  # "max" is no number, and -1 means no limit
                    quotas.append(float(quota) / float(period))
    return min(quotas)


def _set_by_torchrun(ranks: RankInfo, env: Mapping[str, str]) -> bool:
    """Return whether torchrun, which starts this rank, was started without OMP_NUM_THREADS.

    It sets 1 for its ranks then. Without access to its environment the answer is no.
    """
    if ranks.launcher != "torchrun" or env["OMP_NUM_THREADS"] != "1":
        return False
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(each.startswith(b"OMP_NUM_THREADS=") for each in variables)
