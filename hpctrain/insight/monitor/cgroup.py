"""CPU and memory of the job on this node, by its control group, versions 1 and 2.

The group of the job counts what all its processes use, and has its limits. A machine's own numbers
would contain those of other jobs. Outside of a job the processes of the run are added up instead.
"""

import os
import re
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import psutil

from hpctrain.base.processes.cgroup import ROOT, cpu_quota, folders, memory_limit, memory_used, text


class Use(NamedTuple):
    """What the job uses on this node."""

    cpu_s: float | None  # CPU time so far, in seconds; None if it is not known
    cores: float  # that the job may use
    memory: int | None  # in bytes, without the cache of files; None if it is not known
    memory_limit: int  # in bytes


class JobCgroup:
    """The control group of the job of a process; `root` and `proc` are where Linux mounts them."""

    def __init__(self, pid: int, root: Path = ROOT, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._cpu, self._memory, self._cpuset = (
            _of_job(folders(kind, proc / str(pid) / "cgroup", root))
            for kind in ("cpuacct", "memory", "cpuset")
        )

    @property
    def found(self) -> bool:
        """Whether the process is in the control group of a job."""
        return bool(self._cpu or self._memory)

    def use(self) -> Use:
        """Return what the job uses now; without a control group, what the processes use."""
        if not self.found:
            return _of_processes(self._pid)
        machine = int(psutil.virtual_memory().total)
        return Use(
            _cpu_seconds(self._cpu[0]) if self._cpu else None,
            self._cores(),
            memory_used(self._memory[0]) if self._memory else None,
            int(min(machine, memory_limit(self._memory))),
        )

    def _cores(self) -> float:
        """Return the cores that the job may use: of its set of cores, and of its quota."""
        names = ("cpuset.cpus.effective", "cpuset.cpus")
        given = next(
            filter(None, (text(job, name) for job in self._cpuset[:1] for name in names)), ""
        )
        count = len(cpu_list(given)) if given else len(os.sched_getaffinity(self._pid))
        return min(float(count), cpu_quota(self._cpu))


def _of_job(groups: Iterable[Path]) -> list[Path]:
    """Return the group of the job and those above it; [] outside of a job.

    Slurm names it `job_ID`, below which the steps and tasks have groups of their own.
    """
    return list(dropwhile(lambda group: not re.fullmatch(r"job_\d+", group.name), groups))


def cpu_list(text: str) -> set[int]:
    """Return the numbers of a list of the kernel, such as `0-3,8`."""
    ranges = [part.partition("-") for part in filter(None, text.split(","))]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _cpu_seconds(job: Path) -> float | None:
    if nanoseconds := text(job, "cpuacct.usage"):
        return int(nanoseconds) / 1e9
    stat = dict(line.split() for line in text(job, "cpu.stat").splitlines())
    return int(stat["usage_usec"]) / 1e6 if "usage_usec" in stat else None


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
