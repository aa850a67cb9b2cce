"""What a folder lies on: the network, memory or a disk of this node; and how much fits there."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Kind = Literal["network", "memory", "disk"]

# By the name that the kernel gives the mount. FUSE is nearly always a network behind it on a
# cluster; `fuseblk` (a local disk) has another name.
NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs\w*|ceph|cifs|smb\d?|smbfs|afs|9p|panfs|wekafs|pvfs2|orangefs"
    r"|glusterfs|quobyte|virtiofs|dvs|datawarp|fuse(\..+)?"
)
MEMORY = re.compile(r"tmpfs|ramfs")
# Of the node itself, though FUSE.
_LOCAL = re.compile(r"fuse\.(fuse-overlayfs|squashfuse\w*|lxcfs)")
MOUNTS = Path("/proc/self/mountinfo")
CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def kind_of(folder: Path, mounts: Path = MOUNTS) -> Kind:
    """Return what kind of file system `folder`, or the nearest folder above it that exists, is on.

    Args:
        folder: Links in it are followed.
        mounts: What is mounted where, in the format of /proc/self/mountinfo (proc(5)).
    """
    real, found, best = os.path.realpath(folder), "", ""
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the later one lies over the earlier
            found, best = after.split(" ")[0], point
    if NETWORK.fullmatch(found) and not _LOCAL.fullmatch(found):
        return "network"
    return "memory" if MEMORY.fullmatch(found) else "disk"


def free_bytes(folder: Path) -> int:
    """Return what may be written there, less a fiftieth of the disk: nobody's disk is filled."""
    info = os.statvfs(folder)
    return (info.f_bavail - info.f_blocks // 50) * info.f_frsize


def job_memory(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of memory that this process's job may use on this node.

    The least of the machine's memory, the limits of the process's cgroup (version 1 or 2) and of
    those above it, and what Slurm says that the job asked for.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()]
    megabytes = int(environ.get("SLURM_MEM_PER_NODE") or 0)
    per_cpu, cpus = environ.get("SLURM_MEM_PER_CPU"), environ.get("SLURM_CPUS_ON_NODE")
    if not megabytes and per_cpu and cpus:
        megabytes = int(per_cpu) * int(cpus)
    return min([*limits, megabytes * 2**20] if megabytes else limits)


def _cgroup_limits() -> list[int]:
    own, root = CGROUPS
    limits = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        elif not controllers:
            top, name = root, "memory.max"
        else:
            continue
        group = Path(top, path.lstrip("/"))
        for folder in (group, *group.parents):  # Slurm's limit is on the job's, above the task's
            file = folder / name
            if file.exists() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
            if folder == top:
                break
    return limits
