"""The control groups of a process, versions 1 and 2: their folders and limits.

/proc/PID/cgroup ── job_12/step_0/user/task_3 ── its folder, then those above it, up to the mount
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def folders(kind: str, membership: Path = OWN, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders for a kind of resource, such as "memory", the innermost first.

    `membership` is the file /proc/PID/cgroup. In a container it may name groups of the host, of
    which only the mount exists here.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in sorted(lines, reverse=True):  # those of version 1, then `0::` of version 2
        number, kinds, path = line.split(":", 2)
        if number != "0" and kind not in kinds.split(","):
            continue
        for name in ("unified", "") if number == "0" else (kind, kinds):
            group = root / name / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_dir():
                    yield folder
                if folder == root / name:
                    break


def text(folder: Path, name: str) -> str:
    """Return what a file of a group has; "" if there is none."""
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return ""


def memory_limit(groups: Iterable[Path]) -> float:
    """Return the least limit of the groups in bytes; infinite without one.

    Version 1 writes a number near 2**63 where there is none.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    found = [text(group, name) for group in groups for name in names]
    return min((int(each) for each in found if each.isdigit()), default=math.inf)


def memory_used(group: Path) -> int | None:
    """Return the bytes in use. The cache of files is left out: the kernel gives it back."""
    used = text(group, "memory.current") or text(group, "memory.usage_in_bytes")
    if not used:
        return None
    stat = dict(line.split() for line in text(group, "memory.stat").splitlines())
    cache = stat.get("total_inactive_file") or stat.get("inactive_file") or 0
    return max(0, int(used) - int(cache))


def memory_left(
    membership: Path = OWN, root: Path = ROOT, meminfo: Path = Path("/proc/meminfo")
) -> float:
    """Return the bytes that the node and the control groups of this process have left."""
    found = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
    groups = [*folders("memory", membership, root)]
    free = [memory_limit([group]) - (memory_used(group) or 0) for group in groups]
    return min([1024 * int(found[1]) if found else math.inf, *free])


def cpu_quota(groups: Iterable[Path]) -> float:
    """Return the least quota of the groups in cores; infinite without one."""
    quotas = [math.inf]
    for group in groups:
        older = f"{text(group, 'cpu.cfs_quota_us')} {text(group, 'cpu.cfs_period_us')}"
        with suppress(ValueError, ZeroDivisionError):
            quota, period = map(float, (text(group, "cpu.max") or older).split())
            if quota > 0:  # "max" is no number, and -1 means no limit
                quotas.append(quota / period)
    return min(quotas)


def cores(system: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, without those of hyperthreading."""
    cpus = os.sched_getaffinity(0)
    siblings = {_siblings(system, cpu) for cpu in cpus}
    groups = folders("cpu", system / "proc/self/cgroup", system / "sys/fs/cgroup")
    return max(1, math.floor(min(len(siblings), cpu_quota(groups))))


def _siblings(system: Path, cpu: int) -> str:
    topology = system / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
