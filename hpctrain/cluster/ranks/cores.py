"""The CPU cores that this process may use, and the share of one rank.

    CPU affinity: taskset, Slurm       ┐
    CPU quota: docker --cpus, systemd  ├── cores / ranks on this node ── torch's threads of a rank
    launch.cpus_per_task               ┘

torch starts one thread per core of the machine in every process. The threads of several ranks on
one machine then wait for each other, and all ranks become several times slower.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.processes import cgroup
from hpctrain.cluster.ranks.ranks import RankInfo


def threads(ranks: RankInfo, cpus_per_task: int, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of torch's threads for this rank; None when the environment says it.

    Under Slurm a rank has got the cores that it has asked for. Elsewhere 1, the default, means its
    share of the cores that there are. OMP_NUM_THREADS counts; torchrun sets it to 1.
    """
    if "OMP_NUM_THREADS" in env:
        return None
    if ranks.launcher == "slurm":
        return cpus_per_task
    share = max(1, cores() // ranks.local_world_size)
    return share if cpus_per_task == 1 else min(share, cpus_per_task)


def cores(system: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, without those of hyperthreading."""
    cpus = os.sched_getaffinity(0)
    siblings = {_siblings(system, cpu) for cpu in cpus}
    groups = cgroup.folders("cpu", system / "proc/self/cgroup", system / "sys/fs/cgroup")
    return max(1, math.floor(min(len(siblings), cgroup.cpu_quota(groups))))


def _siblings(system: Path, cpu: int) -> str:
    topology = system / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
