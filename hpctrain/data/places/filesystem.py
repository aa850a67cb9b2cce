"""The kind of file system that a folder is on, and how much may be written there."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hpctrain import cgroup

Kind = Literal["network", "memory", "disk"]

# The type of the mount, as the kernel names it. FUSE on a cluster is nearly always a network file
# system; a local disk behind FUSE is called `fuseblk`.
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs\w*|ceph|cifs|smb\d?|smbfs|afs|9p|panfs|wekafs|pvfs2|orangefs"
    r"|glusterfs|quobyte|virtiofs|dvs|datawarp|fuse(\..+)?"
)
_MEMORY = re.compile(r"tmpfs|ramfs")
# File systems of the node itself that use FUSE.
_LOCAL = re.compile(r"fuse\.(fuse-overlayfs|squashfuse\w*|lxcfs)")
MOUNTS = Path("/proc/self/mountinfo")


def kind_of(folder: Path, mounts: Path = MOUNTS) -> Kind:
    """Return the kind of file system of `folder`, or of the nearest existing folder above it."""
    real, found, best = os.path.realpath(folder), "", ""
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            found, best = after.split(" ")[0], point
    if _NETWORK.fullmatch(found) and not _LOCAL.fullmatch(found):
        return "network"
    return "memory" if _MEMORY.fullmatch(found) else "disk"


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
