"""CPU and memory of the job on this node, by its control group, versions 1 and 2.

    /proc/PID/cgroup ── job_12/step_0/user/task_3 ── the group of the whole job: job_12

The group of the job counts what all its processes use, and has its limits. A machine's own numbers
would contain those of other jobs. Outside of a job the processes of the run are added up instead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import psutil

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 where there is none


class Use(NamedTuple):
    """What the job uses on this node."""

    cpu_s: float | None  # CPU time so far, in seconds; None if it is not known
    cores: float  # that the job may use
    memory: int | None  # in bytes, without the cache of files; None if it is not known
    memory_limit: int  # in bytes


class JobCgroup:
    """The control group of the job of a process; `root` and `proc` are where Linux mounts them."""

    def __init__(self, pid: int, root: Path = _ROOT, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._cpu, self._memory, self._cpuset = (
            _job_folder(root, proc / str(pid) / "cgroup", kind)
            for kind in ("cpuacct", "memory", "cpuset")
        )

    @property
    def found(self) -> bool:
        """Whether the process is in the control group of a job."""
        return self._cpu is not None or self._memory is not None

    def use(self) -> Use:
        """Return what the job uses now; without a control group, what the processes use."""
        if not self.found:
            return _of_processes(self._pid)
        return Use(
            _cpu_seconds(self._cpu), self._cores(), _memory(self._memory), _limit(self._memory)
        )

    def _cores(self) -> float:
        """Return the cores that the job may use: of its set of cores, and of its quota."""
        text = _text(self._cpuset, "cpuset.cpus.effective") or _text(self._cpuset, "cpuset.cpus")
        count = float(len(cpu_list(text)) if text else len(os.sched_getaffinity(self._pid)))
        quota, period = [*(_text(self._cpu, "cpu.max") or "max").split(), "100000"][:2]
        return count if quota == "max" else min(count, int(quota) / int(period))


def _job_folder(root: Path, membership: Path, kind: str) -> Path | None:
    """Return the folder of the job's group for a kind of resource, or None outside of a job.

    Slurm names it `job_ID`, below which the steps and tasks have groups of their own.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in sorted(lines, reverse=True):  # those of version 1, then `0::` of version 2
        number, kinds, path = line.split(":", 2)
        if number != "0" and kind not in kinds.split(","):
            continue
        job = re.match(r"(.*/job_\d+)(/|$)", path)
        if job is None:
            continue
        for base in (root / kind, root / kinds, root / "unified", root):
            if (folder := base / job[1].lstrip("/")).is_dir():
                return folder
    return None


def _text(folder: Path | None, name: str) -> str | None:
    if folder is None:
        return None
    try:
        return (folder / name).read_text().strip() or None
    except OSError:
        return None


def cpu_list(text: str) -> set[int]:
    """Return the numbers of a list of the kernel, such as `0-3,8`."""
    ranges = [part.partition("-") for part in filter(None, text.split(","))]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _cpu_seconds(folder: Path | None) -> float | None:
    if (nanoseconds := _text(folder, "cpuacct.usage")) is not None:
        return int(nanoseconds) / 1e9
    stat = dict(line.split() for line in (_text(folder, "cpu.stat") or "").splitlines())
    return int(stat["usage_usec"]) / 1e6 if "usage_usec" in stat else None


def _memory(folder: Path | None) -> int | None:
    """Return the bytes in use. The cache of files is left out: the kernel gives it back."""
    used = _text(folder, "memory.current") or _text(folder, "memory.usage_in_bytes")
    if used is None:
        return None
    stat = dict(line.split() for line in (_text(folder, "memory.stat") or "").splitlines())
    cache = stat.get("total_inactive_file") or stat.get("inactive_file") or 0
    return max(0, int(used) - int(cache))


def _limit(folder: Path | None) -> int:
    """Return the limit of the job in bytes; that of the machine if it has none."""
    machine = int(psutil.virtual_memory().total)
    while folder is not None and folder != _ROOT and folder.parent != folder:
        text = _text(folder, "memory.max") or _text(folder, "memory.limit_in_bytes") or "max"
        if text != "max" and int(text) < _NO_LIMIT:
            return min(machine, int(text))
        folder = folder.parent
    return machine


def _of_processes(pid: int) -> Use:
    """Return the sum over a process and all that descend from it."""
    cpu_s, memory = 0.0, 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        family = []
    for process in family:
        try:
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            memory += process.memory_info().rss
        except psutil.Error:  # it has ended meanwhile
            continue
    cores = float(len(os.sched_getaffinity(0)))
    return Use(cpu_s, cores, memory, int(psutil.virtual_memory().total))
