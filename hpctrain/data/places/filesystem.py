"""How much may be written into a folder, and how much memory a job has."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain import cgroup


def free_bytes(folder: Path) -> int:
    """Return how many bytes may be written there: the free space less 2 % of the disk."""
    info = os.statvfs(folder)
    return (info.f_bavail - info.f_blocks // 50) * info.f_frsize


def job_memory(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of memory that this process's job may use on this node.

    It is the least of the machine's memory, the cgroup's limits and what was asked of Slurm.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [machine, cgroup.memory_limit(cgroup.folders("memory"))]
    megabytes = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    per_cpu, cpus = environ.get("SLURM_MEM_PER_CPU"), environ.get("SLURM_CPUS_ON_NODE")
    if not megabytes and per_cpu and cpus:
        megabytes = int(per_cpu) * int(cpus)
    return int(min([*limits, megabytes * 2**20] if megabytes else limits))
